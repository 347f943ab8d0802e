// The page of preferences as HTML: works without scripts, loads nothing, and is read by screens and screen readers alike
// (WCAG 2.2 AA). Everything that others wrote is escaped.
import { createHash } from 'node:crypto';
import type { Preferences, SavedPreferences } from '../audience/preferences.ts';
import type { PageTexts, PreferencePolicy } from './preference-policy.ts';

/** HTML and the policy that lets its one style sheet in. */
export interface Page {
  readonly html: string;
  readonly contentSecurityPolicy: string;
}

export interface PageLook {
  readonly policy: PreferencePolicy;
  /** Of `policy.texts`. */
  readonly language: string;
}

/** The fields of the form. */
export const FORM = {
  /** In each of them: all others may be absent, and what is no form of ours decides nothing. */
  form: 'preferences',
  /** Ids of the topics that were shown, and of those that are ticked. */
  shown: 'shown',
  topic: 'topic',
  all: 'all',
} as const;

export function preferencePage(look: PageLook, preferences: Preferences): Page {
  const texts = textsOf(look);
  return frame(look, texts.title, `<h1>${escape(texts.title)}</h1>\n${form(texts, preferences)}`);
}

/** What holds now, and the way back. */
export function savedPage(look: PageLook, { before, after }: SavedPreferences): Page {
  const texts = textsOf(look);
  const told = after.isUnsubscribed ? texts.saved_all : texts.saved;
  return frame(
    look,
    told,
    `<h1>${escape(texts.title)}</h1>
<p class="told" role="status">${escape(told)}</p>
${isSame(before, after) || before.isGone ? '' : undo(texts, before)}
${form(texts, after)}`,
  );
}

export function messagePage(look: PageLook, about: 'not_found' | 'unavailable'): Page {
  const texts = textsOf(look);
  const title = texts[`${about}_title`];
  return frame(look, title, `<h1>${escape(title)}</h1>\n<p>${escape(texts[about])}</p>`);
}

const textsOf = ({ policy, language }: PageLook): PageTexts => policy.texts.get(language)!;

/** `a***@example.com`: enough to know one's own, too little for whoever finds the link. */
export function masked(address: string): string {
  const at = address.lastIndexOf('@');
  const [first = ''] = address.slice(0, at);
  return `${first}***${address.slice(at)}`;
}

function form(texts: PageTexts, { address, isGone, isUnsubscribed, topics }: Preferences): string {
  if (address === null) return `<p>${escape(texts.gone_unknown)}</p>`;
  const shown = isGone ? [] : topics.filter(({ isShown }) => isShown);
  const intro = (isGone ? texts.gone : texts.intro).replaceAll('{address}', () => masked(address));
  const boxes = shown.map(({ id, name, description, isWanted }) =>
    box(
      { name: FORM.topic, value: id, id: `t-${id}`, isTicked: isWanted },
      { label: name, hint: description },
    ),
  );
  const list =
    boxes.length > 0
      ? `<fieldset>\n<legend>${escape(texts.topics)}</legend>\n${boxes.join('\n')}\n</fieldset>`
      : isGone
        ? ''
        : `<p>${escape(texts.no_topics)}</p>`;
  const all = box(
    { name: FORM.all, value: '1', id: 'all', isTicked: isUnsubscribed },
    { label: texts.all, hint: texts.all_hint },
  );
  return `<p>${escape(intro)}</p>
<form method="post">
${hidden(FORM.form, '1')}
${shown.map(({ id }) => hidden(FORM.shown, id)).join('\n')}
${list}
${all}
<button type="submit">${escape(texts.save)}</button>
</form>`;
}

/** The form as it was before, already filled in. */
function undo(texts: PageTexts, before: Preferences): string {
  const inputs = [
    hidden(FORM.form, '1'),
    ...before.topics.map(({ id }) => hidden(FORM.shown, id)),
    ...before.topics.filter(({ isWanted }) => isWanted).map(({ id }) => hidden(FORM.topic, id)),
    ...(before.isUnsubscribed ? [hidden(FORM.all, '1')] : []),
  ];
  return `<form method="post">
${inputs.join('\n')}
<button type="submit" class="second">${escape(texts.undo)}</button>
</form>`;
}

const hidden = (name: string, value: string): string =>
  `<input type="hidden" name="${name}" value="${escape(value)}">`;

function box(
  input: {
    readonly name: string;
    readonly value: string;
    readonly id: string;
    readonly isTicked: boolean;
  },
  words: { readonly label: string; readonly hint: string | null },
): string {
  const id = escape(input.id);
  const hint = words.hint ?? '';
  return `<div class="box"><input type="checkbox" id="${id}" name="${input.name}" value="${escape(input.value)}"${
    input.isTicked ? ' checked' : ''
  }${hint === '' ? '' : ` aria-describedby="${id}-hint"`}><label for="${id}">${escape(words.label)}</label>${
    hint === '' ? '' : `<p id="${id}-hint">${escape(hint)}</p>`
  }</div>`;
}

const isSame = (a: Preferences, b: Preferences): boolean =>
  a.isUnsubscribed === b.isUnsubscribed &&
  a.topics.every(
    ({ id, isWanted }) => b.topics.find((one) => one.id === id)?.isWanted === isWanted,
  );

function frame({ policy, language }: PageLook, title: string, body: string): Page {
  const { brand } = policy;
  const texts = policy.texts.get(language)!;
  const style = styleOf(policy);
  const hash = createHash('sha256').update(style).digest('base64');
  const named = brand.name === null ? '' : ` – ${escape(brand.name)}`;
  const header = brand.name === null ? '' : `<header><p>${escape(brand.name)}</p></header>\n`;
  const footer =
    brand.supportUrl === null
      ? ''
      : `\n<footer><p><a href="${escape(brand.supportUrl)}" rel="noreferrer">${escape(texts.support)}</a></p></footer>`;
  return {
    html: `<!doctype html>
<html lang="${escape(language)}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex, nofollow">
<title>${escape(title)}${named}</title>
<style>${style}</style>
</head>
<body>
${header}<main>
${body}
</main>${footer}
</body>
</html>
`,
    contentSecurityPolicy: `default-src 'none'; style-src 'sha256-${hash}'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'`,
  };
}

/** Colours are six hexadecimal digits (preference-policy.ts). */
const styleOf = ({ colours: { background, text, accent } }: PreferencePolicy): string => `
body { margin: 0 auto; max-width: 36rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif;
  background: ${background}; color: ${text}; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; }
fieldset { border: 1px solid ${text}; border-radius: 0.25rem; margin: 0 0 1rem; padding: 0.5rem 1rem; }
legend { font-weight: bold; padding: 0 0.25rem; }
.box { display: grid; grid-template-columns: auto 1fr; align-items: center; column-gap: 0.75rem; margin: 0.25rem 0; }
.box input { width: 1.5rem; height: 1.5rem; margin: 0.625rem 0; accent-color: ${accent}; }
.box label { padding: 0.5rem 0; }
.box p { grid-column: 2; margin: 0 0 0.5rem; font-size: 0.9375rem; }
.told { border-left: 0.25rem solid ${accent}; padding: 0.5rem 1rem; font-weight: bold; }
button { font: inherit; min-height: 2.75rem; min-width: 7rem; margin: 0.75rem 0; padding: 0.5rem 1.5rem;
  border: 2px solid ${accent}; border-radius: 0.25rem; background: ${accent}; color: ${background}; cursor: pointer; }
button.second { background: ${background}; color: ${accent}; }
a { color: ${accent}; }
a:focus-visible, button:focus-visible, input:focus-visible { outline: 3px solid ${text}; outline-offset: 2px; }
`;

const ENTITIES: Readonly<Record<string, string>> = {
  '&': '&amp;',
  '<': '&lt;',
  '>': '&gt;',
  '"': '&quot;',
  "'": '&#39;',
};
const escape = (text: string): string => text.replace(/[&<>"']/g, (found) => ENTITIES[found]!);
