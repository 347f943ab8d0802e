// What an operator decides about the page of preferences (config/preferences.json): its words in each language, its
// colours, and whose it is. What a file leaves out is as it ships; a file that leaves a page unreadable is refused.
import { fields, isObject, wrong } from '../mail/rule-file.ts';

const TEXTS = [
  'title',
  'intro',
  'topics',
  'no_topics',
  'all',
  'all_hint',
  'save',
  'saved',
  'saved_all',
  'undo',
  'gone',
  'gone_unknown',
  'not_found_title',
  'not_found',
  'unavailable_title',
  'unavailable',
  'support',
] as const;

/** `{address}` stands for the masked address in `intro` and `gone`. Plain text: it is escaped where it is shown. */
export type PageTexts = Readonly<Record<(typeof TEXTS)[number], string>>;

export interface PreferencePolicy {
  /** One of `texts`. */
  readonly defaultLanguage: string;
  readonly brand: {
    readonly name: string | null;
    /** https. */
    readonly supportUrl: string | null;
  };
  readonly colours: Readonly<Record<Colour, string>>;
  /** By language: a primary subtag in lower case. */
  readonly texts: ReadonlyMap<string, PageTexts>;
}

type Colour = (typeof COLOURS)[number];
const COLOURS = ['background', 'text', 'accent'] as const;
const LANGUAGES_MAX = 50;
const TEXT_MAX_CHARACTERS = 500;
const NAME_MAX_CHARACTERS = 100;
const URL_MAX_CHARACTERS = 500;
/** Of text on what is behind it (WCAG 2.2, 1.4.3, level AA). */
const CONTRAST_MIN = 4.5;
// oxlint-disable-next-line no-control-regex
const CONTROLS = /[\u0000-\u001f\u007f-\u009f\u2028\u2029]/;

/** Reads what ships, on its own. Throws an Error that names the key and says what is wrong with it. */
export const readShippedPreferences = (file: unknown): PreferencePolicy => read(file, null);

/** Reads an operator's file over what ships. Throws as above. */
export const readPreferencePolicy = (file: unknown, shipped: PreferencePolicy): PreferencePolicy =>
  read(file, shipped);

function read(file: unknown, shipped: PreferencePolicy | null): PreferencePolicy {
  const root = fields(file, 'the file', {
    default_language: shipped?.defaultLanguage ?? null,
    brand: {},
    colours: {},
    texts: {},
  });
  const brand = fields(root.brand, 'brand', { name: null, support_url: null });
  const colours = fields(root.colours, 'colours', {
    background: shipped?.colours.background ?? null,
    text: shipped?.colours.text ?? null,
    accent: shipped?.colours.accent ?? null,
  });
  const texts = readTexts(root.texts, shipped?.texts ?? new Map());
  const defaultLanguage = String(root.default_language);
  if (!texts.has(defaultLanguage)) {
    throw wrong('default_language', `one of ${[...texts.keys()].join(', ')}`);
  }
  return {
    defaultLanguage,
    brand: {
      name: brand.name === null ? null : oneLine(brand.name, 'brand.name', NAME_MAX_CHARACTERS),
      supportUrl: brand.support_url === null ? null : readUrl(brand.support_url),
    },
    colours: readColours(colours),
    texts,
  };
}

function readTexts(
  value: unknown,
  shipped: ReadonlyMap<string, PageTexts>,
): ReadonlyMap<string, PageTexts> {
  if (!isObject(value)) throw wrong('texts', 'an object');
  const texts = new Map(shipped);
  for (const [language, given] of Object.entries(value)) {
    const at = `texts.${language}`;
    if (!/^[a-z]{2,3}$/.test(language)) throw wrong(at, 'named by a language such as `it`');
    const before = texts.get(language);
    const all = fields(
      given,
      at,
      Object.fromEntries(TEXTS.map((name) => [name, before?.[name] ?? null])) as Record<
        (typeof TEXTS)[number],
        unknown
      >,
    );
    const read = TEXTS.map((name) => [
      name,
      oneLine(all[name], `${at}.${name}`, TEXT_MAX_CHARACTERS),
    ]);
    texts.set(language, Object.fromEntries(read) as PageTexts);
  }
  if (texts.size > LANGUAGES_MAX) throw new Error(`texts: has more than ${LANGUAGES_MAX} entries`);
  return texts;
}

function oneLine(value: unknown, at: string, max: number): string {
  const isFine =
    typeof value === 'string' &&
    value.trim() !== '' &&
    value.length <= max &&
    value.isWellFormed() &&
    !CONTROLS.test(value);
  if (!isFine) throw wrong(at, `one line of 1 to ${max} characters`);
  return value;
}

function readUrl(value: unknown): string {
  const text = typeof value === 'string' && value.length <= URL_MAX_CHARACTERS ? value : '';
  const url = URL.parse(text);
  if (url?.protocol !== 'https:') throw wrong('brand.support_url', 'an https URL');
  return url.href;
}

function readColours(given: Readonly<Record<Colour, unknown>>): PreferencePolicy['colours'] {
  const colours = Object.fromEntries(
    COLOURS.map((name) => {
      const value = given[name];
      if (typeof value === 'string' && /^#[0-9a-f]{6}$/i.test(value)) return [name, value];
      throw wrong(`colours.${name}`, 'a colour such as `#1d4ed8`');
    }),
  ) as Record<Colour, string>;
  for (const name of ['text', 'accent'] as const) {
    const contrast = contrastOf(colours[name], colours.background);
    if (contrast < CONTRAST_MIN) {
      throw new Error(
        `colours.${name}: its contrast to the background is ${contrast.toFixed(1)}; at least ${CONTRAST_MIN} can be read`,
      );
    }
  }
  return colours;
}

/** 1 to 21 (WCAG 2.2, "contrast ratio"). */
function contrastOf(a: string, b: string): number {
  const [light, dark] = [luminanceOf(a), luminanceOf(b)].toSorted((x, y) => y - x);
  return (light! + 0.05) / (dark! + 0.05);
}

function luminanceOf(colour: string): number {
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const part = Number.parseInt(colour.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red! + 0.7152 * green! + 0.0722 * blue!;
}

/** Of what the browser asks for (RFC 9110 §12.5.4) the best that there is, else the default. */
export function pickLanguage(accept: string | undefined, policy: PreferencePolicy): string {
  const wanted = (accept ?? '')
    .slice(0, ACCEPT_MAX_CHARACTERS)
    .split(',')
    .map((part) => {
      const [range = '', ...parameters] = part.trim().toLowerCase().split(';');
      const q = parameters
        .map((one) => /^\s*q=([01](?:\.\d{0,3})?)\s*$/.exec(one)?.[1])
        .find(Boolean);
      return { language: range.trim().split('-')[0]!, weight: Number(q ?? 1) };
    })
    .filter(({ weight }) => weight > 0)
    .toSorted((a, b) => b.weight - a.weight);
  const found = wanted.find(({ language }) => language === '*' || policy.texts.has(language));
  return found === undefined || found.language === '*' ? policy.defaultLanguage : found.language;
}
const ACCEPT_MAX_CHARACTERS = 1_000;
