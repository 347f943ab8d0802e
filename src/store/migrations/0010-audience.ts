// Who is written to and who wants to hear of it: contacts with their segments, topics and imports, broadcasts, custom
// events and automations, what readers did with an email, and webhooks with the outbox that feeds them.
import { Migration } from '@mikro-orm/migrations';

export class Audience extends Migration {
  override up(): void {
    // \`address\` is the email as mail/address.ts normalizes it.
    this.addSql(`
      create table contact (
        tenant_id uuid not null references tenant (id),
        id uuid not null,
        email text not null,
        address text not null,
        first_name text,
        last_name text,
        unsubscribed boolean not null default false,
        properties jsonb not null default '{}',
        created_at timestamptz not null,
        updated_at timestamptz not null,
        primary key (tenant_id, id),
        unique (tenant_id, address)
      )`);
    this.addSql(`
      create table contact_property (
        tenant_id uuid not null references tenant (id),
        id uuid not null,
        key text not null,
        type text not null check (type in ('string', 'number', 'boolean')),
        fallback_value jsonb,
        created_at timestamptz not null,
        updated_at timestamptz not null,
        primary key (tenant_id, id),
        unique (tenant_id, key)
      )`);
    this.addSql(`
      create table segment (
        tenant_id uuid not null references tenant (id),
        id uuid not null,
        name text not null,
        created_at timestamptz not null,
        updated_at timestamptz not null,
        primary key (tenant_id, id)
      )`);
    this.addSql(`
      create table segment_contact (
        tenant_id uuid not null,
        segment_id uuid not null,
        contact_id uuid not null,
        created_at timestamptz not null,
        primary key (tenant_id, segment_id, contact_id),
        foreign key (tenant_id, segment_id) references segment (tenant_id, id) on delete cascade,
        foreign key (tenant_id, contact_id) references contact (tenant_id, id) on delete cascade
      )`);
    this.addSql(`
      create index segment_contact_contact on segment_contact (tenant_id, contact_id, segment_id)`);
    // A row is a choice; without one the topic's default holds. It outlives its topic: mail of that may still wait.
    this.addSql(`
      create table contact_topic (
        tenant_id uuid not null,
        contact_id uuid not null,
        topic_id uuid not null,
        subscription text not null check (subscription in ('opt_in', 'opt_out')),
        updated_at timestamptz not null,
        primary key (tenant_id, contact_id, topic_id),
        foreign key (tenant_id, contact_id) references contact (tenant_id, id) on delete cascade
      )`);
    this.addSql(
      `create index contact_topic_topic on contact_topic (tenant_id, topic_id, contact_id)`,
    );
    // What held where nobody had chosen; it goes after the last choice.
    this.addSql(`
      create table deleted_topic (
        tenant_id uuid not null references tenant (id),
        id uuid not null,
        default_subscription text not null check (default_subscription in ('opt_in', 'opt_out')),
        deleted_at timestamptz not null,
        primary key (tenant_id, id)
      )`);
    this.addSql(`create index deleted_topic_age on deleted_topic (deleted_at)`);
    // \`read_bytes\`: how far the file was read and stored; a restart goes on from there.
    this.addSql(`
      create table contact_import (
        tenant_id uuid not null references tenant (id),
        id uuid not null,
        status text not null check (status in ('queued', 'in_progress', 'completed', 'failed')),
        on_conflict text not null check (on_conflict in ('upsert', 'skip')),
        column_map jsonb,
        segment_ids jsonb not null default '[]',
        topics jsonb not null default '[]',
        blob_key text,
        size_bytes bigint not null,
        read_bytes bigint not null default 0,
        read_rows integer not null default 0,
        created integer not null default 0,
        updated integer not null default 0,
        skipped integer not null default 0,
        failed integer not null default 0,
        failure text,
        tries smallint not null default 0,
        leased_until timestamptz,
        created_at timestamptz not null,
        completed_at timestamptz,
        primary key (tenant_id, id)
      )`);
    this.addSql(`
      create index contact_import_open on contact_import (leased_until)
        where status in ('queued', 'in_progress')`);
    this.addSql(
      `create index contact_import_blob on contact_import (blob_key) where blob_key is not null`,
    );
    this.addSql(`
      create table contact_import_error (
        tenant_id uuid not null,
        import_id uuid not null,
        row integer not null,
        message text not null,
        primary key (tenant_id, import_id, row),
        foreign key (tenant_id, import_id) references contact_import (tenant_id, id) on delete cascade
      )`);

    // \`cursor_id\`: the fan-out has passed this contact; moved in the transaction that stores the emails.
    // \`next_turn_at\`: when it goes on, at the earliest; the one that waits longest comes first.
    this.addSql(`
      create table broadcast (
        tenant_id uuid not null references tenant (id),
        id uuid not null,
        name text not null,
        segment_id uuid,
        topic_id uuid,
        from_given text,
        subject text,
        reply_to_given jsonb not null default '[]',
        preview_text text,
        html text,
        text text,
        status text not null check (status in
          ('draft', 'scheduled', 'queued', 'sent', 'failed', 'canceled')),
        failure text,
        scheduled_at timestamptz,
        queued_at timestamptz,
        sent_at timestamptz,
        cursor_id uuid,
        recipients integer not null default 0,
        left_out integer not null default 0,
        api_key_id uuid,
        next_turn_at timestamptz,
        created_at timestamptz not null,
        updated_at timestamptz not null,
        primary key (tenant_id, id)
      )`);
    this.addSql(`
      create index broadcast_due on broadcast (scheduled_at) where status = 'scheduled'`);
    this.addSql(`
      create index broadcast_queued on broadcast (tenant_id, next_turn_at) where status = 'queued'`);
    // Canceled in the middle: what is queued of it is taken back, from the cursor down.
    this.addSql(`
      create index broadcast_withdrawn on broadcast (tenant_id)
        where status = 'canceled' and cursor_id is not null`);
    // One row for each contact that the fan-out reached, in one transaction with its email. \`email_id\` is null where
    // none was made, and \`left_out\` says why.
    this.addSql(`
      create table broadcast_recipient (
        tenant_id uuid not null,
        broadcast_id uuid not null,
        contact_id uuid not null,
        address text not null,
        email_id uuid,
        left_out text check (left_out in ('suppressed', 'unsubscribed', 'failed')),
        unsubscribed_at timestamptz,
        primary key (tenant_id, broadcast_id, contact_id)
      )`);
    this.addSql(`
      create index broadcast_recipient_email on broadcast_recipient (tenant_id, email_id)
        where email_id is not null`);
    // A contact that is removed and made again has another id.
    this.addSql(`
      create index broadcast_recipient_address on broadcast_recipient (tenant_id, broadcast_id, address)
        where email_id is not null`);
    this.addSql(`alter table email add column broadcast_id uuid`);
    // Of an email whose attachments are fetched first: its html is tracked as was decided when it was accepted.
    this.addSql(`alter table email_content add column tracking jsonb`);
    this.addSql(
      `alter table receiving_replay add column kinds jsonb not null default '["forward"]'`,
    );
    // What its recipient opted out of is no dead letter, and there may be many of it.
    this.addSql(`drop index delivery_dead`);
    this.addSql(`
      create index delivery_dead on delivery (tenant_id, email_id)
        where (state = 'failed' and last_cause is distinct from 'unsubscribed')
          or (state = 'bounced' and last_cause = 'expired') or (state = 'unknown' and unknowns >= 2)`);

    // What a reader did: opened, clicked, unsubscribed. \`suspect\`: why it may have been a machine.
    this.addSql(`
      create table engagement (
        tenant_id uuid not null,
        email_id uuid not null,
        id uuid not null,
        kind text not null check (kind in ('opened', 'clicked', 'unsubscribed')),
        at timestamptz not null,
        link text,
        remote_address text,
        user_agent text,
        suspect text,
        broadcast_id uuid,
        primary key (tenant_id, email_id, id)
      )`);
    this.addSql(`
      create index engagement_broadcast on engagement (tenant_id, broadcast_id, kind, email_id)
        where broadcast_id is not null`);

    // Secrets are sealed (seal.ts). \`secret_previous\` signs as well until its time is over. \`failures\`: calls since
    // \`failing_since\`.
    this.addSql(`
      create table webhook (
        tenant_id uuid not null references tenant (id),
        id uuid not null,
        endpoint text not null,
        events text[] not null,
        status text not null check (status in ('enabled', 'disabled')),
        disabled_reason text,
        secret_sealed bytea not null,
        secret_previous_sealed bytea,
        secret_previous_until timestamptz,
        failing_since timestamptz,
        failures integer not null default 0,
        created_at timestamptz not null,
        updated_at timestamptz not null,
        primary key (tenant_id, id)
      )`);
    // What is to be told, written in the transaction that made it true (timeline/outbox.ts) and removed in the one that
    // makes a webhook_event of it for each endpoint.
    this.addSql(`
      create table outbox (
        tenant_id uuid not null,
        id uuid not null,
        type text not null,
        subject_id uuid not null,
        detail jsonb not null,
        at timestamptz not null,
        primary key (tenant_id, id)
      ) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0)`);
    // The id is the outbox row's: the same at every endpoint and on every try. \`lease_id\`: who calls; until
    // \`next_attempt_at\` it is nobody else's. What is left of an endpoint that was removed is cleared away in pieces.
    this.addSql(`
      create table webhook_event (
        tenant_id uuid not null,
        webhook_id uuid not null,
        id uuid not null,
        type text not null,
        payload text not null,
        status text not null check (status in ('pending', 'attempting', 'success', 'failed')),
        attempts integer not null default 0,
        next_attempt_at timestamptz,
        lease_id uuid,
        created_at timestamptz not null,
        primary key (tenant_id, webhook_id, id)
      ) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0)`);
    this.addSql(`
      create index webhook_event_due on webhook_event (tenant_id, webhook_id, next_attempt_at, id)
        where next_attempt_at is not null`);
    this.addSql(`
      create table webhook_attempt (
        tenant_id uuid not null,
        webhook_id uuid not null,
        event_id uuid not null,
        id uuid not null,
        sent_at timestamptz not null,
        duration_ms integer,
        http_status smallint,
        response text,
        error text,
        primary key (tenant_id, webhook_id, event_id, id)
      )`);

    this.addSql(`
      create table event_definition (
        tenant_id uuid not null references tenant (id),
        id uuid not null,
        name text not null,
        schema jsonb,
        created_at timestamptz not null,
        updated_at timestamptz not null,
        primary key (tenant_id, id),
        unique (tenant_id, name)
      )`);
    // Of \`stopped_at\`: the runs that began until then end as cancelled, and it is null again when all have; of
    // \`removed_at\`: nobody sees it any more, and the row goes when its runs are gone.
    this.addSql(`
      create table automation (
        tenant_id uuid not null references tenant (id),
        id uuid not null,
        name text not null,
        status text not null check (status in ('enabled', 'disabled')),
        trigger_event text not null,
        steps jsonb not null,
        connections jsonb not null,
        stopped_at timestamptz,
        removed_at timestamptz,
        created_at timestamptz not null,
        updated_at timestamptz not null,
        primary key (tenant_id, id)
      )`);
    this.addSql(`
      create index automation_closing on automation (tenant_id, id)
        where stopped_at is not null or removed_at is not null`);
    this.addSql(`
      create index automation_trigger on automation (tenant_id, trigger_event) where status = 'enabled'`);
    // Steps and connections are those of the moment it began. \`due_at\`: when the step it stands at goes on; null once
    // it has ended.
    this.addSql(`
      create table automation_run (
        tenant_id uuid not null,
        id uuid not null,
        automation_id uuid not null,
        contact_id uuid not null,
        address text not null,
        event jsonb not null,
        steps jsonb not null,
        connections jsonb not null,
        status text not null check (status in ('running', 'completed', 'failed', 'cancelled')),
        step_key text,
        waits_for text,
        due_at timestamptz,
        tries smallint not null default 0,
        started_at timestamptz,
        completed_at timestamptz,
        created_at timestamptz not null,
        primary key (tenant_id, id),
        foreign key (tenant_id, automation_id) references automation (tenant_id, id) on delete cascade
      )`);
    this.addSql(
      `create index automation_run_due on automation_run (due_at) where due_at is not null`,
    );
    // Who is due, tenant by tenant, so that all take turns.
    this.addSql(`
      create index automation_run_turn on automation_run (tenant_id, due_at)
        where due_at is not null`);
    this.addSql(`
      create index automation_run_open on automation_run (tenant_id, address, waits_for)
        where due_at is not null`);
    this.addSql(`
      create index automation_run_status on automation_run (tenant_id, automation_id, status, id)`);
    this.addSql(`
      create index automation_run_ended on automation_run (completed_at)
        where completed_at is not null`);
    // \`request\`: what a step that sends an email asks for, fixed when it begins, so that every try asks for the same.
    this.addSql(`
      create table automation_run_step (
        tenant_id uuid not null,
        run_id uuid not null,
        key text not null,
        type text not null,
        status text not null check (status in
          ('pending', 'running', 'completed', 'failed', 'skipped', 'waiting')),
        request jsonb,
        output jsonb,
        error jsonb,
        created_at timestamptz not null,
        started_at timestamptz,
        completed_at timestamptz,
        primary key (tenant_id, run_id, key),
        foreign key (tenant_id, run_id) references automation_run (tenant_id, id) on delete cascade
      )`);

    // What became of the emails of a quarter of an hour, of those from one domain and of one broadcast (the nil UUID: of
    // none): all quarters before the tenant's \`counted_until\`, those without mail excepted (sending/metric-rollup.ts).
    this.addSql(`
      create table metric_quarter (
        tenant_id uuid not null,
        quarter timestamptz not null,
        domain text not null,
        broadcast_id uuid not null,
        received integer not null,
        delivered integer not null,
        complained integer not null,
        suppressed integer not null,
        bounced integer not null,
        bounced_transient integer not null,
        bounced_permanent integer not null,
        bounced_undetermined integer not null,
        opened integer not null,
        clicked integer not null,
        unsubscribed integer not null,
        delivery_delayed integer not null,
        failed integer not null,
        sent integer not null,
        unknown integer not null,
        unique_opened integer not null,
        unique_clicked integer not null,
        primary key (tenant_id, quarter, domain, broadcast_id)
      )`);
    this.addSql(`
      create table metric_rolled (
        tenant_id uuid not null primary key references tenant (id),
        counted_until timestamptz not null
      )`);
    // Something of it has changed since; counted anew by who still finds the same token.
    this.addSql(`
      create table metric_stale (
        tenant_id uuid not null,
        quarter timestamptz not null,
        token uuid not null,
        primary key (tenant_id, quarter)
      )`);
  }
}
