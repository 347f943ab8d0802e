// What each kind of signed link opens: part of the composition root.
import { Readable } from 'node:stream';
import type { LinkedEmail, LinkOpeners } from './access/linked.ts';
import type { LinkTarget } from './access/signed-link.ts';
import {
  findReceived,
  readReceivedAttachment,
  readReceivedRaw,
  type ReceivedDependencies,
} from './receiving/read-received.ts';
import { openAttachment } from './sending/read-attachments.ts';
import { findEmail } from './sending/read.ts';
import { sharedEmail } from './sending/share.ts';

export function createLinkOpeners(d: ReceivedDependencies): LinkOpeners {
  return {
    attachment: openAttachment(d),
    email: (target) => openEmail(d, target),
    async received_raw({ tenantId, id }) {
      const raw = await readReceivedRaw(d, tenantId, id);
      return raw === null ? null : fileOf(`${id}.eml`, 'message/rfc822', raw);
    },
    async received_attachment({ tenantId, id, partId }) {
      if (partId === null) return null;
      const at = { emailId: id, attachmentId: partId };
      const found = await readReceivedAttachment(d, tenantId, at);
      if (found === null) return null;
      const { filename, content_type: type } = found.about;
      return fileOf(filename ?? 'attachment', type, found.content);
    },
  };
}

const fileOf = (filename: string, contentType: string, bytes: Buffer) => ({
  kind: 'file' as const,
  filename,
  contentType,
  sizeBytes: bytes.length,
  content: Readable.from([bytes], { objectMode: false }),
});

/** A sent email, or a received one. */
async function openEmail(
  { store }: ReceivedDependencies,
  { tenantId, id }: LinkTarget,
): Promise<LinkedEmail | null> {
  const sent = await findEmail(store, tenantId, id);
  if (sent !== null) return sharedEmail(sent);
  const received = await findReceived(store, tenantId, id);
  if (received === null) return null;
  return {
    kind: 'email',
    subject: received.subject,
    from: received.fromShown,
    to: received.toShown,
    cc: received.ccShown,
    createdAt: received.createdAt,
    html: received.content.html ?? null,
    text: received.content.text ?? null,
  };
}
