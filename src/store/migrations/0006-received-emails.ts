// What arrives for the receiving domains of tenants: one row for each tenant that a message is for. The
// message itself and what was read from it are apart, so that lists stay narrow.
import { Migration } from '@mikro-orm/migrations';

export class ReceivedEmails extends Migration {
  override up(): void {
    this.addSql(`
      create table received_email (
        tenant_id uuid not null,
        id uuid not null,
        created_at timestamptz not null,
        mail_from text not null,
        received_for jsonb not null,
        route_decisions jsonb not null,
        from_shown text not null,
        to_shown jsonb not null,
        cc_shown jsonb not null,
        bcc_shown jsonb not null,
        reply_to_shown jsonb not null,
        subject text not null,
        message_id text,
        attachments jsonb not null,
        primary key (tenant_id, id)
      )`);
    this.addSql(`
      create table received_content (
        tenant_id uuid not null,
        email_id uuid not null,
        html text,
        text text,
        headers jsonb,
        raw bytea,
        blob_key text,
        raw_size_bytes integer not null,
        primary key (tenant_id, email_id),
        check ((raw is null) <> (blob_key is null))
      )`);
    this.addSql(`
      create index received_content_blob on received_content (blob_key)
      where blob_key is not null`);
    // Whose a recipient's domain is, before anything is known about a tenant.
    this.addSql(`
      create index sending_domain_receiving on sending_domain (name) where receiving`);
  }
}
