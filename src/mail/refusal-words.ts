/**
 * What mail hosts say when they refuse, as patterns: whether their words are about us (address, name, authentication,
 * policy), about what the message holds, about how much we send, or about the recipient.
 *
 * In: the text of a reply. Out: a RefusalTopic, or null when the words say nothing that is known. Addresses and URLs
 * are no words: a mailbox called `spam@` is no block list. Every pattern is linear in the text, which parseReply cuts.
 */

export type RefusalTopic =
  /** Too much, too fast, too many at a time: passes by itself. */
  | 'rate'
  /** Our address, its name in the DNS, a list that it is on, authentication, relaying, a policy. */
  | 'sender'
  /** Taken for spam or a virus, or holds what the host does not take. */
  | 'content'
  /** Too large, or not written as the host wants it. */
  | 'message'
  | 'full'
  | 'recipient'
  | 'domain'
  /** Nobody answered for too long. */
  | 'late';

const RATE =
  /\btoo (?:many|much) (?:concurrent |simultaneous |open |parallel |smtp |e-?)?(?:connections?|sessions?|messages?|mails?|recipients|requests)\b|\b(?:rate|frequency|throughput|volume) ?(?:is |has been )?(?:limit|exceed|throttl)|\b(?:temporarily )?throttl(?:ed|ing)\b|\brate that\b|\btoo (?:quickly|fast|frequently)\b|\bslow(?:er| down)\b|\b(?:sent|sending|sends) (?:\w+ ){0,3}too (?:many|much)\b|\b(?:hourly|daily) (?:\w+ )?(?:limit|quota)\b|\bper (?:minute|hour|day)\b/i;

const SENDER =
  /\b(?:spf|dkim)\b|\bdmarc|\bunauthenticated\b|\bauthenticat(?:ed|ion)\b|\b(?:not|un) ?authori[sz]ed\b|\bblock(?:ed|ing)? ?(?:list|using|by)\b|\b(?:is|are|been|was|ip|host|domain|network|from) (?:[\w.-]+ ){0,4}blocked\b|(?:^|[;:,.] )blocked\b|\bbl(?:ack|ock)[ -]?list|\bdeny ?list|\bbanned\b|(?<!not )\blisted (?:at|by|in|on)\b|\breputation\b|\bdnsb?l\b|\brbl\b|\bsorbs\b|\bbarracuda|\bptr\b|\breverse (?:dns|lookup|name|mapping)|\brdns\b|\brelay|\baccess (?:is |was )?(?:denied|forbidden|rejected)\b|\bforbidden\b|\bnot (?:allowed|permitted|welcome)\b|\bpermission\b|\bpolic(?:y|ies)\b|\bsenders?\b|\bsending (?:ip|server|host|mta|domain|address|history)|\bip ?(?:address)? for sending\b|\baccept (?:e-?)?mail from\b|\byour (?:ip|server|host|domain|network|isp|mail ?server|smtp)|\bclient (?:ip|host|address)|\bof your isp\b|\bunverif(?:y|i)able\b|\bhelo\b|\b(?:invalid|bad|your) (?:domain|host) ?name\b|\bfrom: (?:domain|address|header)|\bip ?= ?[\d[]|\bcompla(?:int|ints|ined)\b|\bunwanted\b|\bsecurity (?:polic|reason|issue|risk|threat)|\byou(?:'re| are) (?:sending|not (?:a |the )?(?:member|allowed|authori))/i;

const CONTENT =
  /\bspam|\bjunk|\bvirus|\bmalware\b|\bphish|\bunsolicited\b|\bsuspicious\b|\bu[bc]e\b|\bcontent\b|\battachments?\b|\bscore|\bprohibited\b|\b(?:e-?mail|mail|message) (?:was |has been |is )?(?:rejected|refused|denied|blocked|filtered)\b/i;

const MESSAGE =
  /\b(?:message|mail|size|header|content|body)\b.{0,40}\b(?:too (?:big|large)|exceeds?|exceeded|maximum|limit)\b|\brfc ?-?(?:2|5)[38]22\b|\b(?:multiple|duplicate|missing|invalid|malformed) (?:\w+ )?(?:headers?|addresses in)\b|\bheader error\b|\bimproperly[- ]formatted\b|\bmedia (?:error|type)\b/i;

const FULL =
  /\bmailbox(?: \S+)? (?:is )?(?:full|exceed)|\b(?:mail|in)box (?:is )?(?:full|out of)|\bover ?-?quota\b|\bquota (?:has been |is )?exceeded|\bexceed(?:s|ed|ing)? (?:\w+ ){0,3}(?:quota|storage|mailbox|disk|local limit|allowed size)|\bout of storage|\bquota violation|\bmailbox limit|\binsufficient (?:disk|system) (?:storage|space)/i;

const RECIPIENT =
  /\b(?:user|recipient|mailbox|address|account|alias)\b.*\b(?:unknown|not found|not known|not exist|does(?:n't| not) exist|no longer|disabled|discontinued|deactivated|inactive|invalid|frozen|moved|not listed|could(?:n't| not) be found)\b|\b(?:unknown|invalid|no such|no|disabled|inactive|bad) (?:local |valid |e-?mail )?(?:users?|recipients?|mailbox|address|account|person)\b|\bnot a valid (?:user|recipient|mailbox)\b|\bnot our (?:user|customer)\b|\bno mailbox here\b|\bunrouteable address\b|\bdoes(?:n't| not) have an? (?:\S+ )?account\b|\brcpt.to\b.*\bnot accepted\b/i;

const DOMAIN =
  /\b(?:host|domain)(?: or domain)?(?: name)? (?:is )?(?:unknown|not found|does(?:n't| not) exist)\b|\b(?:no such|unknown|illegal) (?:host|domain)|\bnxdomain\b|\bname service error\b|\bhad no relevant answers\b|\bcouldn't find any host\b|\bnull mx\b|\bno mx\b|\bno smtp service\b|\bdoes(?:n't| not) (?:receive|accept) (?:e-?)?mail\b|\bdomain is not reachable\b/i;

const LATE =
  /\btim(?:ed?|e) ?-?out\b|\btimeout\b|\bexpired?\b|\btoo long\b|\bnot (?:be )?delivered (?:within|for)\b|\bdid not accept our requests to connect\b|\b(?:unable|wasn't able|could not|failed|failure) (?:to )?(?:connect|establish)|\bnot reachable\b|\bunreachable\b|\bno route\b|\bconnection (?:refused|lost|reset|dropped)\b|\bretr(?:y|ied)\b|\b\d+ attempts\b|\bnetwork error\b/i;

/** Addresses, with or without brackets, and URLs. */
const NO_WORDS =
  /<[^<>\s]{1,320}@[^<>\s]{1,255}>|\bhttps?:\/\/\S{1,500}|[^\s<>@]{1,64}@[\w.-]{1,255}/gi;

/** What the words are about; where several fit, the one that is worse for us, so that no recipient is blamed for us. */
export function topicOfRefusal(text: string): RefusalTopic | null {
  const words = text.replace(NO_WORDS, ' ');
  return TOPICS.find(([, pattern]) => pattern.test(words))?.[0] ?? null;
}

/** Also about us or the message: then words about the recipient prove nothing. */
export function isAboutUs(text: string): boolean {
  const words = text.replace(NO_WORDS, ' ');
  return [RATE, SENDER, CONTENT].some((pattern) => pattern.test(words));
}

/** They say that the mailbox does not exist or is closed. */
export function isAboutRecipient(text: string): boolean {
  return RECIPIENT.test(text.replace(NO_WORDS, ' '));
}

export function isAboutFullMailbox(text: string): boolean {
  return FULL.test(text.replace(NO_WORDS, ' '));
}

/** They say that less, or slower, would be taken. */
export function isAboutRate(text: string): boolean {
  return RATE.test(text.replace(NO_WORDS, ' '));
}

const TOPICS: readonly (readonly [RefusalTopic, RegExp])[] = [
  ['rate', RATE],
  ['full', FULL],
  ['message', MESSAGE],
  ['sender', SENDER],
  ['content', CONTENT],
  ['domain', DOMAIN],
  ['recipient', RECIPIENT],
  ['late', LATE],
];
