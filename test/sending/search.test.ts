// What an email is found by, and what a search may ask: the lexemes on both sides must meet.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { Refusal } from '../../src/access/refusal.ts';
import { checkEmailFilters, NO_FILTERS, searchTermsOf } from '../../src/sending/search.ts';
import { newId } from '../../src/store/id.ts';

const test = suite('search terms');
const tenantId = newId();
const own = tenantId.slice(-6);
type Given = Parameters<typeof searchTermsOf>[0];

const termsOf = (about: Partial<Given>): string[] =>
  searchTermsOf({
    tenantId,
    subject: '',
    fromDomain: 'sender.test',
    from: 'a@sender.test',
    recipients: [],
    tags: null,
    ...about,
  }).map((term) => term.replace(own, ''));
const words = (subject: string): string[] =>
  termsOf({ subject, from: '' }).flatMap((term) => (term.startsWith('w:') ? [term.slice(2)] : []));
const queryOf = (search: string): string | null =>
  checkEmailFilters(tenantId, { ...NO_FILTERS, search }).terms?.replaceAll(own, '') ?? null;
const refusal = (filters: Partial<typeof NO_FILTERS>): Refusal => {
  try {
    checkEmailFilters(tenantId, { ...NO_FILTERS, ...filters });
  } catch (error) {
    if (error instanceof Refusal) return error;
    throw error;
  }
  throw new Error(`accepted: ${JSON.stringify(filters)}`);
};

test('words in any script, in lower case and one spelling', () => {
  assert.equal(words('Hello, WORLD! 2nd-try'), ['hello', 'world', '2nd', 'try']);
  assert.equal(words('ÜBER Straße ΣΊΣΥΦΟΣ'), ['über', 'straße', 'σίσυφος']);
  assert.equal(words('ｆｕｌｌ ﬁt'), ['full', 'fit'], 'full width and ligatures');
  assert.equal(words('cafe\u0301'), ['café'], 'composed and decomposed are one');
  assert.equal(words('हिन्दी'), ['हिन्दी'], 'marks belong to their letters');
  assert.equal(words('🎉 -- …'), []);
  assert.equal(words('日本語x'), ['日本', '本語', '語', 'x']);
});

test('addresses are found whole and in parts, domains as people write them', () => {
  const terms = termsOf({
    from: 'Ada L <Ada@Sender.test>',
    recipients: ['Bob.Smith+x@xn--mnchen-3ya.test'],
    tags: [{ name: 'kind', value: 'welcome' }],
  });
  for (const expected of [
    'd:sender.test',
    't:kind',
    't:kind=welcome',
    'w:ada',
    'w:l',
    'w:bob',
    'w:smith',
    'w:münchen',
    'a:ada@sender.test',
    'a:bob.smith+x@xn--mnchen-3ya.test',
  ]) {
    assert.ok(terms.includes(expected), `${expected} in ${terms.join(' ')}`);
  }
});

test('the number and length of terms are bounded', () => {
  const subject = Array.from({ length: 5_000 }, (_, index) => `word${index}`).join(' ');
  const recipients = Array.from({ length: 150 }, (_, index) => `r${index}@recipient.test`);
  const terms = searchTermsOf({
    tenantId,
    subject: `${'x'.repeat(5_000)} ${subject}`,
    fromDomain: 'sender.test',
    from: 'a@sender.test',
    recipients,
    tags: Array.from({ length: 50 }, (_, index) => ({
      name: 'n'.repeat(250) + index,
      value: 'v'.repeat(256),
    })),
  });
  assert.ok(terms.length <= 700, String(terms.length));
  for (const term of terms) assert.ok(Buffer.byteLength(term) <= 600, term);
  assert.is(new Set(terms).size, terms.length);
});

test('a search asks for every word, and for the beginning of each', () => {
  assert.is(queryOf('Hello wor'), `'w:hello':* & 'w:wor':*`);
  assert.is(queryOf('a hello'), `'w:a' & 'w:hello':*`, 'one letter is a word of its own');
  assert.is(queryOf('Bob@Reci'), `'a:bob@reci':*`);
  assert.is(queryOf('<Bob@Münch.de>,'), `'a:bob@xn--mnch-0ra.de':*`);
  assert.is(queryOf('日本'), `'w:日本' & 'w:本':*`);
  assert.is(queryOf(`it's`), `'w:it':* & 'w:s'`);
  assert.is(queryOf(`o'neil\\@x.test`), `'a:o''neil\\\\@x.test':*`, 'quoted for the tsquery');
});

test('what is wrong is refused with its name', () => {
  for (const [filters, path] of [
    [{ status: 'lost' }, 'status'],
    [{ status: 'sent,,bounced' }, 'status'],
    [{ status: '' }, 'status'],
    [{ tagValue: 'x' }, 'tag_name'],
    [{ tagName: 'no spaces' }, 'tag_name'],
    [{ tagNameAlias: '' }, 'tagName'],
    [{ tagName: 'a', tagValue: 'ä' }, 'tag_value'],
    [{ tagName: 'a', tagNameAlias: 'b' }, 'tagName'],
    [{ domain: 'not a domain' }, 'domain'],
    [{ domain: 'localhost' }, 'domain'],
    [{ startDate: 'yesterday' }, 'start_date'],
    [{ endDate: '2026-02-30' }, 'end_date'],
    [{ startDate: '2026-05-02', endDate: '2026-05-01' }, 'end_date'],
    [{ search: 'x' }, 'search'],
    [{ search: 'x'.repeat(201) }, 'search'],
    [{ search: '!! ??' }, 'search'],
    [{ search: Array.from({ length: 21 }, (_, index) => `w${index}`).join(' ') }, 'search'],
  ] as const) {
    const { issues, status } = refusal(filters);
    assert.is(status, 422);
    assert.equal(
      issues.map((issue) => issue.path),
      [path],
      JSON.stringify(filters),
    );
  }
  assert.is(refusal({ status: 'x', domain: '-', search: '' }).issues.length, 3);
});

test('good filters are taken as they are meant', () => {
  const check = (about: Partial<typeof NO_FILTERS>) =>
    checkEmailFilters(tenantId, { ...NO_FILTERS, ...about });
  assert.equal(check({}), { statuses: null, terms: null, fromId: null, toId: null });
  assert.equal(check({ status: 'sent, bounced,sent' }).statuses, ['sent', 'bounced']);
  assert.is(check({ tagName: 'a', tagValue: '' }).terms, `'${own}t:a='`);
  assert.is(check({ domain: 'Münch.de' }).terms, `'${own}d:xn--mnch-0ra.de'`);
  const day = check({ startDate: '2026-05-06', endDate: '2026-05-06' });
  const idAt = (text: string): string =>
    `${Date.parse(text).toString(16).padStart(12, '0').replace(/^.{8}/, '$&-')}-7000-8000-000000000000`;
  assert.is(day.fromId, idAt('2026-05-06T00:00:00Z'));
  assert.is(day.toId, idAt('2026-05-07T00:00:00Z'));
});

test.run();
