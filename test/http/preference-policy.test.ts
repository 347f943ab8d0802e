// config/preferences.json: what ships, what an operator may say, and what is refused with its key.
import { readFileSync } from 'node:fs';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { messagePage } from '../../src/http/preference-page.ts';
import {
  pickLanguage,
  readPreferencePolicy,
  readShippedPreferences,
} from '../../src/http/preference-policy.ts';

const test = suite('preference policy');
const file = JSON.parse(
  readFileSync(new URL('../../config/preferences.json', import.meta.url), 'utf8'),
) as { texts: Record<string, Record<string, string>> };
const shipped = readShippedPreferences(file);

test('it ships whole in four languages, and an empty file is what ships', () => {
  assert.equal([...shipped.texts.keys()], ['en', 'de', 'fr', 'es']);
  const names = Object.keys(file.texts['en']!);
  for (const [language, texts] of Object.entries(file.texts)) {
    assert.equal(Object.keys(texts), names, language);
    for (const name of ['intro', 'gone']) assert.match(texts[name]!, '{address}');
  }
  assert.equal(readPreferencePolicy({}, shipped), shipped);
  assert.equal(readPreferencePolicy(file, shipped), shipped);
});

test('an operator changes single words, adds a language and has his colours', () => {
  const policy = readPreferencePolicy(
    {
      default_language: 'it',
      brand: { name: 'Acme' },
      colours: { background: '#000000', text: '#ffffff', accent: '#FACC15' },
      texts: { de: { save: 'Sichern' }, it: { ...file.texts['en'], save: 'Salva' } },
    },
    shipped,
  );
  assert.is(policy.texts.get('de')?.save, 'Sichern');
  assert.is(policy.texts.get('de')?.title, shipped.texts.get('de')?.title);
  assert.is(policy.texts.get('it')?.save, 'Salva');
  assert.is(pickLanguage('tlh', policy), 'it');
  assert.equal(policy.brand, { name: 'Acme', supportUrl: null });
  const page = messagePage({ policy, language: 'it' }, 'unavailable');
  assert.match(page.html, 'Please try again in a few minutes. Nothing has been changed.');
  assert.match(page.html, 'background: #000000');
});

test('the best language that there is', () => {
  const cases: readonly (readonly [accept: string | undefined, language: string])[] = [
    [undefined, 'en'],
    ['', 'en'],
    ['de', 'de'],
    ['DE-ch', 'de'],
    ['pt,fr;q=0.2,es;q=0.9', 'es'],
    ['fr;q=0,*;q=0.1', 'en'],
    [`${'x,'.repeat(600)}de`, 'en'],
    ['constructor,__proto__', 'en'],
  ];
  for (const [accept, language] of cases) {
    assert.is(pickLanguage(accept, shipped), language, String(accept).slice(0, 40));
  }
});

test('whatever is not known, unreadable or unsafe is refused with its key', () => {
  const cases: readonly (readonly [file: unknown, words: RegExp])[] = [
    [[], /^the file: must be an object$/],
    [{ colors: {} }, /^the file: "colors" is not known; it may hold default_language, brand/],
    [{ brand: { logo: 'x' } }, /^brand: "logo" is not known; it may hold name, support_url$/],
    [{ brand: { name: 'a\nb' } }, /^brand\.name: must be one line/],
    [{ brand: { support_url: 'http://x.test' } }, /^brand\.support_url: must be an https URL$/],
    [
      { brand: { support_url: 'javascript:alert(1)' } },
      /^brand\.support_url: must be an https URL$/,
    ],
    [{ colours: { text: 'red' } }, /^colours\.text: must be a colour such as `#1d4ed8`$/],
    [{ colours: { accent: '#fff;}' } }, /^colours\.accent: must be a colour/],
    [
      { colours: { accent: '#facc15' } },
      /^colours\.accent: its contrast to the background is 1\.5; /,
    ],
    [{ colours: { background: '#1f2937' } }, /^colours\.text: its contrast .* is 1\.0; /],
    [{ default_language: 'it' }, /^default_language: must be one of en, de, fr, es$/],
    [{ texts: [] }, /^texts: must be an object$/],
    [{ texts: { 'en-GB': {} } }, /^texts\.en-GB: must be named by a language such as `it`$/],
    [{ texts: { en: { titel: 'x' } } }, /^texts\.en: "titel" is not known; it may hold title, /],
    [
      { texts: { en: { title: '' } } },
      /^texts\.en\.title: must be one line of 1 to 500 characters$/,
    ],
    [{ texts: { it: { title: 'x' } } }, /^texts\.it\.intro: must be one line/],
    [{ texts: { en: { title: 'x'.repeat(501) } } }, /^texts\.en\.title: /],
  ];
  for (const [own, words] of cases) {
    assert.throws(
      () => readPreferencePolicy(own, shipped),
      (error: Error) => words.test(error.message),
      JSON.stringify(own).slice(0, 60),
    );
  }
});

test.run();
