// The first schema: tenants and keys, sending domains, emails, deliveries, attempts, timeline, the
// sink's messages. tenant_id leads every key of a tenant-owned table, so the schema can be
// distributed by tenant as it is. The hot tables (email, email_content, delivery, attempt, timeline)
// carry no foreign keys: one statement writes them together, and only queue/ changes them.
import { Migration } from '@mikro-orm/migrations';

export class FirstHouse extends Migration {
  override up(): void {
    this.addSql(`
      create table tenant (
        id uuid primary key,
        name text not null,
        created_at timestamptz not null default now()
      )`);

    this.addSql(`
      create table sending_domain (
        tenant_id uuid not null references tenant (id),
        id uuid not null,
        name text not null,
        status text not null check (status in
          ('not_started', 'pending', 'verified', 'partially_verified', 'partially_failed', 'failed')),
        region text not null default 'us-east-1',
        return_path_label text not null default 'send',
        sending boolean not null default true,
        receiving boolean not null default false,
        created_at timestamptz not null default now(),
        primary key (tenant_id, id),
        unique (tenant_id, name)
      )`);

    this.addSql(`
      create table dkim_key (
        tenant_id uuid not null,
        domain_id uuid not null,
        selector text not null,
        algorithm text not null check (algorithm in ('rsa-sha256', 'ed25519-sha256')),
        private_key_sealed bytea not null,
        public_record text not null,
        created_at timestamptz not null default now(),
        primary key (tenant_id, domain_id, selector),
        foreign key (tenant_id, domain_id) references sending_domain (tenant_id, id) on delete cascade
      )`);

    this.addSql(`
      create table api_key (
        tenant_id uuid not null references tenant (id),
        id uuid not null,
        name text not null,
        prefix text not null,
        hash bytea not null,
        permission text not null default 'full_access'
          check (permission in ('full_access', 'sending_access')),
        domain_id uuid,
        created_at timestamptz not null default now(),
        revoked_at timestamptz,
        primary key (tenant_id, id)
      )`);
    // The one lookup that does not know its tenant yet.
    this.addSql(`create unique index api_key_hash on api_key (hash)`);

    this.addSql(`
      create table email (
        tenant_id uuid not null,
        id uuid not null,
        created_at timestamptz not null,
        message_id text not null,
        from_given text not null,
        from_domain text not null,
        to_given jsonb not null,
        cc_given jsonb,
        bcc_given jsonb,
        reply_to_given jsonb,
        subject text not null,
        tags jsonb,
        last_event text not null,
        recipient_count smallint not null,
        provider_retry_count integer not null default 0,
        provider_last_attempted_at timestamptz,
        provider_next_retry_at timestamptz,
        provider_last_error jsonb,
        provider_dead_lettered_at timestamptz,
        primary key (tenant_id, id)
      ) with (fillfactor = 75)`);

    this.addSql(`
      create table email_content (
        tenant_id uuid not null,
        email_id uuid not null,
        html text,
        text text,
        headers jsonb,
        raw bytea,
        raw_size_bytes integer not null,
        blob_key text,
        needs_smtp_utf8 boolean not null,
        signing_tenant_id uuid,
        signing_domain_id uuid,
        primary key (tenant_id, email_id),
        check ((raw is null) <> (blob_key is null))
      )`);

    this.addSql(`
      create table delivery (
        tenant_id uuid not null,
        email_id uuid not null,
        position smallint not null,
        recipient text not null,
        lane text not null,
        state text not null check (state in
          ('ready', 'in_flight', 'deferred', 'delivered', 'bounced', 'failed', 'unknown')),
        due_at timestamptz not null,
        expires_at timestamptz not null,
        attempts integer not null default 0,
        unknowns smallint not null default 0,
        lease_epoch uuid,
        last_cause text,
        last_reply text,
        primary key (tenant_id, email_id, position)
      ) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02,
              autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0.1)`);
    this.addSql(`
      create index delivery_ready on delivery (tenant_id, due_at, email_id, position)
        where state = 'ready'`);
    this.addSql(`
      create index delivery_waiting on delivery (due_at, lane)
        where state in ('deferred', 'unknown')`);
    this.addSql(`
      create index delivery_leased on delivery (lease_epoch) where state = 'in_flight'`);

    this.addSql(`
      create table attempt (
        tenant_id uuid not null,
        email_id uuid not null,
        position smallint not null,
        number integer not null,
        started_at timestamptz not null,
        finished_at timestamptz,
        outcome text,
        cause text,
        stage text,
        host text,
        address text,
        port integer,
        tls text,
        code smallint,
        enhanced text,
        reply text,
        primary key (tenant_id, email_id, position, number)
      ) with (fillfactor = 75)`);

    this.addSql(`
      create table timeline (
        tenant_id uuid not null,
        email_id uuid not null,
        id uuid not null,
        at timestamptz not null,
        kind text not null,
        detail jsonb,
        primary key (tenant_id, email_id, id)
      )`);

    this.addSql(`
      create table idempotency_key (
        tenant_id uuid not null,
        scope text not null,
        key text not null,
        request_hash bytea not null,
        status smallint not null,
        response jsonb not null,
        created_at timestamptz not null,
        primary key (tenant_id, scope, key)
      )`);
    this.addSql(`create index idempotency_key_age on idempotency_key (created_at)`);

    this.addSql(`
      create table worker (
        epoch uuid primary key,
        host text not null,
        pid integer not null,
        started_at timestamptz not null,
        heartbeat_at timestamptz not null
      )`);

    this.addSql(`
      create table sink_message (
        id uuid primary key,
        mail_from text not null,
        rcpt_to jsonb not null,
        raw bytea not null,
        received_at timestamptz not null,
        tls boolean not null
      )`);
  }
}
