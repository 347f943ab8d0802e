// What a text says about a time, and whether that time will do: tables of both, and dates by the thousand against the
// runtime's own.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { parseSchedule, planTime } from '../../src/sending/schedule-grammar.ts';

const now = new Date('2030-01-31T12:00:00.000Z');

/** The time in ISO form, or the problem. */
function read(text: string): string {
  const parsed = parseSchedule(text);
  if (!parsed.ok) return parsed.problem;
  const planned = planTime(parsed.schedule, now);
  return planned.ok ? planned.at.toISOString() : planned.problem;
}

const good: Readonly<Record<string, string>> = {
  'in 1 minute': '2030-01-31T12:01:00.000Z',
  'in 1 min': '2030-01-31T12:01:00.000Z',
  'in 1 minutes': '2030-01-31T12:01:00.000Z',
  'in 90 minutes': '2030-01-31T13:30:00.000Z',
  'in 1 hour': '2030-01-31T13:00:00.000Z',
  'in 36 hours': '2030-02-02T00:00:00.000Z',
  'in 1 day': '2030-02-01T12:00:00.000Z',
  'in 2 days': '2030-02-02T12:00:00.000Z',
  'in 30 days': '2030-03-02T12:00:00.000Z',
  'in 720 hours': '2030-03-02T12:00:00.000Z',
  'in 007 days': '2030-02-07T12:00:00.000Z',
  '2030-01-31T12:00:01Z': '2030-01-31T12:00:01.000Z',
  '2030-01-31T12:00:00.001Z': '2030-01-31T12:00:00.001Z',
  '2030-01-31T12:00:00,5Z': '2030-01-31T12:00:00.500Z',
  '2030-02-01T00:00Z': '2030-02-01T00:00:00.000Z',
  '2030-02-01T09:30:00.123456789Z': '2030-02-01T09:30:00.123Z',
  '2030-02-01T09:30:00.540771+00:00': '2030-02-01T09:30:00.540Z',
  '2030-01-31T14:00:01+02:00': '2030-01-31T12:00:01.000Z',
  '2030-01-31T06:31-05:30': '2030-01-31T12:01:00.000Z',
  '2030-03-02T12:00:00Z': '2030-03-02T12:00:00.000Z',
  '2030-02-01t12:00:00z': '2030-02-01T12:00:00.000Z',
  '2030-02-01T12:00:00+02': '2030-02-01T10:00:00.000Z',
  '2030-02-01T12:00:00.25-0530': '2030-02-01T17:30:00.250Z',
};

const grammar = /^must be an ISO 8601 date-time with a time zone/;
const impossible = /^names a date or time that does not exist$/;
const future = /^must be in the future$/;
const distant = /^must be at most 30 days from now$/;
const zone = /^needs a time zone/;
const unit = /^must count in minutes, hours or days$/;
const bad: Readonly<Record<string, RegExp>> = {
  '': grammar,
  ' ': grammar,
  now: grammar,
  soon: grammar,
  'tomorrow at 9am': grammar,
  'in an hour': grammar,
  'in 1': grammar,
  'in hour': grammar,
  'in -1 hours': grammar,
  'in +1 hours': grammar,
  'in 1.5 hours': grammar,
  'in 1e2 minutes': grammar,
  'in  1 hour': grammar,
  ' in 1 hour': grammar,
  'in 1 hour ': grammar,
  'in 1 hour\n': grammar,
  'in 1 hour from now': grammar,
  'In 1 hour': grammar,
  'in 1 Hour': grammar,
  'in 1hour': grammar,
  '1 hour': grammar,
  'in ١ hour': grammar,
  'in 1 second': unit,
  'in 1 week': unit,
  'in 1 mins': unit,
  'in 1 constructor': unit,
  'in 0 minutes': future,
  'in 00 days': future,
  'in 31 days': distant,
  'in 721 hours': distant,
  'in 999999999 days': distant,
  'in 9999999999 days': grammar,
  '2030-01-31T12:00:00Z': future,
  '2030-01-31T11:59:59.999Z': future,
  '2030-01-31T13:59:59+02:00': future,
  '2030-02-01T01:00+13:00': future,
  '0001-01-01T00:00:00Z': future,
  '2030-03-02T12:00:00.001Z': distant,
  '9999-12-31T23:59:59Z': distant,
  '2030-02-01T09:30:00': zone,
  '2030-02-01T09:30': zone,
  '2030-02-01 09:30:00': zone,
  '2030-02-29T12:00:00Z': impossible,
  '2030-02-30T12:00:00Z': impossible,
  '2030-02-00T12:00:00Z': impossible,
  '2030-00-10T12:00:00Z': impossible,
  '2030-13-01T12:00:00Z': impossible,
  '2030-04-31T12:00:00Z': impossible,
  '2030-02-01T24:00:00Z': impossible,
  '2030-02-01T23:60:00Z': impossible,
  '2030-02-01T23:59:60Z': impossible,
  '2030-02-01T12:00:00+24:00': impossible,
  '2030-02-01T12:00:00+01:60': impossible,
  '2030-02-01': grammar,
  '2030-02-01Z': grammar,
  '2030-2-1T12:00:00Z': grammar,
  '2030-02-01T12Z': grammar,
  '2030-02-01 12:00:00Z': grammar,
  '2030-02-01T12:00:00 Z': grammar,
  '2030-02-01T12:00:00+020': grammar,
  '2030-02-01T12:00:00+02:': grammar,
  '2030-02-01T12:00:00+0260': impossible,
  '2030-02-01T12:00:00+2:00': grammar,
  '2030-02-01T12:00:00.Z': grammar,
  '2030-02-01T12:00:00Z[Europe/Paris]': grammar,
  '+002030-02-01T12:00:00Z': grammar,
  '20300201T120000Z': grammar,
  '2030-W05-1T12:00:00Z': grammar,
  '1893456000': grammar,
  '2030-02-01T12:00:00Z\0': grammar,
  ['2030-02-01T12:00:00.'.padEnd(100, '0').concat('Z')]: grammar,
};

const test = suite('schedule grammar');

for (const [text, wanted] of Object.entries(good)) {
  test(`${text} is ${wanted}`, () => assert.is(read(text), wanted));
}
for (const [text, problem] of Object.entries(bad)) {
  test(`${JSON.stringify(text)} is refused`, () => assert.match(read(text), problem));
}

test('every day that the calendar has is a day, and no other', () => {
  let days = 0;
  for (const year of [1900, 2000, 2023, 2024, 2100]) {
    for (let month = 1; month <= 12; month += 1) {
      for (let day = 1; day <= 31; day += 1) {
        const two = (n: number): string => String(n).padStart(2, '0');
        const text = `${year}-${two(month)}-${two(day)}T10:20:30Z`;
        const exists = day <= new Date(Date.UTC(year, month, 0)).getUTCDate();
        const parsed = parseSchedule(text);
        assert.is(parsed.ok, exists, text);
        if (!parsed.ok) continue;
        assert.is(parsed.schedule.at?.toISOString(), `${text.slice(0, -1)}.000Z`);
        days += 1;
      }
    }
  }
  assert.is(days, 365 * 3 + 366 * 2);
});

test.run();
