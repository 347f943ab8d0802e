// Everything that sending needs beside the first house: schedules, attachments (their bytes lie inside
// the stored message; those named by URL are fetched first), what lists are searched by, suppressions
// and topics. `email_search` is apart from `email`, so that updates of an email never touch its index.
import { Migration } from '@mikro-orm/migrations';

export class WholeSending extends Migration {
  override up(): void {
    this.addSql(`
      alter table email
        add column scheduled_at timestamptz,
        add column topic_id uuid,
        add column template_id uuid,
        add column attachment_count smallint not null default 0`);

    // What recipients did, by kind: the list of emails is filtered by it.
    this.addSql(`
      create index timeline_reaction on timeline (tenant_id, kind, email_id)
        where kind in ('complained', 'opened', 'clicked')`);

    // Neither of the two while attachments are being fetched.
    this.addSql(`alter table email_content drop constraint email_content_check`);
    this.addSql(`
      alter table email_content add constraint email_content_one_place
        check (raw is null or blob_key is null)`);

    this.addSql(`alter table delivery drop constraint delivery_state_check`);
    this.addSql(`
      alter table delivery add constraint delivery_state_check check (state in
        ('scheduled', 'preparing', 'ready', 'in_flight', 'deferred', 'delivered', 'bounced', 'failed',
         'unknown', 'suppressed', 'canceled'))`);
    // On deliveries, not on emails: an index that knows last_event would make every update of an email write
    // all its indexes. A delivery that just goes through is in neither.
    this.addSql(`create index delivery_scheduled on delivery (due_at) where state = 'scheduled'`);
    this.addSql(`
      create index delivery_kept on delivery (tenant_id, state, email_id) where state in
        ('scheduled', 'preparing', 'deferred', 'bounced', 'failed', 'unknown', 'suppressed',
         'canceled')`);

    // jsonb sorts keys; a replay is the first answer to the byte.
    this.addSql(`alter table idempotency_key alter column response type json`);

    this.addSql(`
      create table attachment (
        tenant_id uuid not null,
        email_id uuid not null,
        id uuid not null,
        position smallint not null,
        filename text,
        content_type text not null,
        content_id text,
        disposition text not null check (disposition in ('attachment', 'inline')),
        size_bytes integer,
        url text,
        blob_key text,
        raw_offset integer,
        raw_length integer,
        primary key (tenant_id, email_id, id)
      )`);

    this.addSql(`
      create table attachment_fetch (
        tenant_id uuid not null,
        email_id uuid not null,
        due_at timestamptz not null,
        attempts integer not null default 0,
        leased_until timestamptz,
        last_error text,
        primary key (tenant_id, email_id)
      )`);
    // What names a blob: asked when blobs without a row are collected.
    this.addSql(`
      create index email_content_blob on email_content (blob_key) where blob_key is not null`);
    this.addSql(`create index attachment_blob on attachment (blob_key) where blob_key is not null`);
    this.addSql(`create index attachment_fetch_due on attachment_fetch (tenant_id, due_at)`);

    this.addSql(`
      create table email_search (
        tenant_id uuid not null,
        email_id uuid not null,
        terms tsvector not null,
        primary key (tenant_id, email_id)
      )`);
    this.addSql(`create index email_search_terms on email_search using gin (terms)`);

    this.addSql(`
      create table suppression (
        tenant_id uuid not null references tenant (id),
        id uuid not null,
        address text not null,
        origin text not null check (origin in ('bounce', 'complaint', 'manual')),
        source_id uuid,
        created_at timestamptz not null default now(),
        primary key (tenant_id, id),
        unique (tenant_id, address)
      )`);

    this.addSql(`
      create table topic (
        tenant_id uuid not null references tenant (id),
        id uuid not null,
        name text not null,
        description text,
        default_subscription text not null check (default_subscription in ('opt_in', 'opt_out')),
        visibility text not null default 'private' check (visibility in ('public', 'private')),
        created_at timestamptz not null default now(),
        updated_at timestamptz not null default now(),
        primary key (tenant_id, id)
      )`);
  }
}
