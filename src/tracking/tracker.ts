// Tracking from both ends: makes the html that leaves, and answers who comes for what is in it.
import { PREFERENCE_PATH } from '../access/signed-link.ts';
import type { EngagementRecorder } from './recorder.ts';
import type { Readers, Visit } from './readers.ts';
import type { TrackedEmail, TrackingTokens } from './tokens.ts';
import { trackHtml, type TrackedHtml, type TrackingPlan } from './track-html.ts';

/** What a domain has switched on. */
export interface TrackingWish {
  readonly opens: boolean;
  readonly clicks: boolean;
  /** Where its links lead; null while the DNS does not say so. */
  readonly host: string | null;
}

export interface HtmlTracker {
  /** Null: nothing is tracked. */
  plan(wish: TrackingWish): TrackingPlan | null;
  apply(html: string, plan: TrackingPlan, of: TrackedEmail): TrackedHtml;
}

export interface TrackingVerbs {
  /** Takes note of an open. False: the token is none of ours. */
  open(token: string, visit: Visit): boolean;
  /** Takes note of a click; where it leads, or null: the token is none of ours. */
  click(token: string, visit: Visit): string | null;
}

/** Of what is kept with an email until its message is composed. */
export function createHtmlTracker(d: {
  readonly tokens: TrackingTokens;
  /** Without a slash at the end. */
  readonly publicUrl: string;
}): HtmlTracker {
  const { tokens, publicUrl } = d;
  const keep = `${publicUrl}${PREFERENCE_PATH}`;
  return {
    plan({ opens, clicks, host }) {
      if (!opens && !clicks) return null;
      return { opens, clicks, base: host === null ? publicUrl : baseAt(publicUrl, host), keep };
    },
    apply: (html, plan, of) => trackHtml(html, plan, { of, tokens }),
  };
}

/** The tracking host is a CNAME to the public one: the same server answers, at the same port and below the same path. */
function baseAt(publicUrl: string, host: string): string {
  const url = new URL(publicUrl);
  url.hostname = host;
  return url.href.replace(/\/+$/, '');
}

export function createTrackingVerbs(d: {
  readonly tokens: TrackingTokens;
  readonly recorder: Pick<EngagementRecorder, 'note'>;
  /** What config/tracking.json says now. */
  readonly readers: () => Readers;
}): TrackingVerbs {
  const note = (
    of: TrackedEmail,
    { visit, link }: { readonly visit: Visit; readonly link: string | null },
  ): void => {
    const readers = d.readers();
    const kind = link === null ? 'opened' : 'clicked';
    d.recorder.note({
      tenantId: of.tenantId,
      emailId: of.emailId,
      kind,
      link,
      address: readers.addressOf(visit),
      userAgent: visit.userAgent,
      suspect: readers.suspectOf(kind, visit),
    });
  };
  return {
    open(token, visit) {
      const of = d.tokens.openPixel(token);
      if (of !== null) note(of, { visit, link: null });
      return of !== null;
    },
    click(token, visit) {
      const link = d.tokens.openLink(token);
      if (link === null) return null;
      note(link, { visit, link: link.link });
      return link.location;
    },
  };
}
