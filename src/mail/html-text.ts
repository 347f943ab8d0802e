/**
 * The plain text that stands beside an HTML body when its author wrote none (html-to-text package).
 *
 * In: HTML of any quality. Out: text with its links, without images, not wrapped (the transfer encoding folds long
 * lines). The work is bounded whatever comes in: input length, number of tags, depth and indentation have limits,
 * beyond which the text ends with an ellipsis. The worst input found costs about 0.1 s, an ordinary one 0.1 ms.
 */
import { compile } from 'html-to-text';
import type { DomNode, FormatCallback } from 'html-to-text';

/** Mail programs clip at about 100 KB; the rest would only be converted for nobody. */
export const htmlCharsMax = 262_144;
export const textCharsMax = 262_144;
/** Opening and closing tags together; the parser's cost grows with tags × open elements. */
export const htmlTagsMax = 20_000;
/** Content nested deeper than this is left out. */
export const htmlDepthMax = 200;
/** Quotes and lists inside each other; deeper ones are not indented, because every level copies all its text. */
export const indentDepthMax = 8;

const ellipsis = '…';
const indented = ['blockquote', 'ul', 'ol'];

/** The package's own formatter, up to the depth limit. */
function upToDepth(formatter: string): FormatCallback {
  return (element, walk, builder, options) => {
    let depth = 0;
    for (let up = element.parent; up; up = up.parent) {
      if (indented.includes(up.name ?? '')) depth += 1;
    }
    const { formatters } = builder.options;
    const format = formatters?.[depth < indentDepthMax ? formatter : 'block'];
    format?.(element, walk, builder, options);
  };
}

const numbersUpToDepth = upToDepth('orderedList');
/** Above, Roman numerals need signs that nobody types; beside zero and below, letters do not count either. */
const letteredNumberMax = 3_999;

function hasLetteredNumbers(list: DomNode): boolean {
  const start = Number(list.attribs?.['start'] ?? '1');
  const last = start + (list.children?.length ?? 0);
  return Number.isInteger(start) && start >= 1 && last <= letteredNumberMax;
}

const convert = compile({
  wordwrap: false,
  limits: { maxDepth: htmlDepthMax, ellipsis },
  formatters: {
    quoteUpToDepth: upToDepth('blockquote'),
    bulletsUpToDepth: upToDepth('unorderedList'),
    numbersUpToDepth: (element, walk, builder, options) => {
      if (!hasLetteredNumbers(element)) delete element.attribs?.['type'];
      numbersUpToDepth(element, walk, builder, options);
    },
  },
  selectors: [
    { selector: 'head', format: 'skip' },
    { selector: 'title', format: 'skip' },
    { selector: 'img', format: 'skip' },
    // React Email marks its invisible preview text so.
    { selector: '#__react-email-preview', format: 'skip' },
    { selector: '[data-skip-in-text=true]', format: 'skip' },
    { selector: 'a', options: { hideLinkHrefIfSameAsText: true, linkBrackets: ['<', '>'] } },
    { selector: 'tr', format: 'block', options: { leadingLineBreaks: 1, trailingLineBreaks: 1 } },
    { selector: 'td', format: 'inlineSurround', options: { suffix: ' ' } },
    { selector: 'th', format: 'inlineSurround', options: { suffix: ' ' } },
    { selector: 'blockquote', format: 'quoteUpToDepth' },
    { selector: 'ul', format: 'bulletsUpToDepth' },
    { selector: 'ol', format: 'numbersUpToDepth' },
    ...['h1', 'h2', 'h3', 'h4', 'h5', 'h6'].map((selector) => ({
      selector,
      options: { uppercase: false },
    })),
  ],
});

/** The text of `html`, possibly empty. */
export function textFromHtml(html: string): string {
  const end = boundedLength(html);
  const text = tidy(convertOrStrip(html.slice(0, end).toWellFormed()));
  const isCut = end < html.length || text.length > textCharsMax;
  return isCut ? `${text.slice(0, textCharsMax).toWellFormed()}\n${ellipsis}` : text;
}

/** Whatever HTML the package cannot take: an email is worth more than its layout. */
function convertOrStrip(html: string): string {
  try {
    return convert(html);
  } catch {
    return stripTags(html);
  }
}

/** The text between the tags; in linear time, unlike an expression that looks for each `>` anew. */
function stripTags(html: string): string {
  let text = '';
  let at = 0;
  while (at < html.length) {
    const open = html.indexOf('<', at);
    text += html.slice(at, open === -1 ? html.length : open);
    const close = open === -1 ? -1 : html.indexOf('>', open);
    if (close === -1) break;
    text += ' ';
    at = close + 1;
  }
  return text.replace(/[^\S\n]+/g, ' ');
}

/** No white space at line ends, never two blank lines in a row: layout tables leave plenty of both. */
function tidy(text: string): string {
  const lines = text.split('\n').map((line) => line.trimEnd());
  return lines
    .join('\n')
    .replace(/\n{3,}/g, '\n\n')
    .replace(/^\n+/, '')
    .trimEnd();
}

/** Where to stop reading: the limit of characters, or the tag after the last one that is allowed. */
function boundedLength(html: string): number {
  let at = -1;
  for (let tags = 0; tags <= htmlTagsMax; tags += 1) {
    at = html.indexOf('<', at + 1);
    if (at === -1 || at >= htmlCharsMax) return Math.min(html.length, htmlCharsMax);
  }
  return at;
}
