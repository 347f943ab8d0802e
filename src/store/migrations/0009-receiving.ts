// What becomes of mail that came in: where it was routed, what its authentication showed, to whom it is forwarded and
// what came of that. A task is written with the message and removed with its attempt, so a forward happens once.
import { Migration } from '@mikro-orm/migrations';

export class ReceivingRoutes extends Migration {
  override up(): void {
    // The empty key stands for every local part.
    this.addSql(`
      create table receiving_route (
        tenant_id uuid not null,
        id uuid not null,
        domain_id uuid not null,
        type text not null check (type in ('exact', 'alias', 'catch_all')),
        local_part text,
        local_key text not null,
        target_local_part text not null,
        created_at timestamptz not null,
        updated_at timestamptz not null,
        primary key (tenant_id, id),
        unique (tenant_id, domain_id, local_key, type),
        check ((type = 'catch_all') = (local_part is null)),
        check ((type = 'catch_all') = (local_key = '')),
        foreign key (tenant_id, domain_id) references sending_domain (tenant_id, id) on delete cascade
      )`);
    // A rule outlives its route: it becomes invalid, and says why.
    this.addSql(`
      create table forwarding_rule (
        tenant_id uuid not null references tenant (id),
        id uuid not null,
        domain_id uuid not null,
        domain text not null,
        route_id uuid not null,
        route_target_address text not null,
        destinations jsonb not null,
        status text not null check (status in ('active', 'disabled', 'invalid')),
        invalid_reason text,
        loops integer not null default 0,
        loops_since timestamptz,
        created_at timestamptz not null,
        updated_at timestamptz not null,
        primary key (tenant_id, id),
        unique (tenant_id, route_id),
        check ((status = 'invalid') = (invalid_reason is not null))
      )`);
    this.addSql(`create index forwarding_rule_domain on forwarding_rule (tenant_id, domain_id)`);
    this.addSql(`
      create table forwarding_task (
        tenant_id uuid not null,
        id uuid not null,
        received_email_id uuid not null,
        rule_id uuid not null,
        recipient text not null,
        replay_id uuid,
        created_at timestamptz not null,
        due_at timestamptz not null,
        tries smallint not null default 0,
        primary key (tenant_id, id)
      )`);
    this.addSql(`create index forwarding_task_due on forwarding_task (due_at)`);
    // Tenants take turns, and mail that arrives goes before a replay.
    this.addSql(`
      create index forwarding_task_turn on forwarding_task
        (tenant_id, (replay_id is not null), due_at)`);
    this.addSql(`
      create index forwarding_task_replay on forwarding_task (tenant_id, replay_id)
        where replay_id is not null`);
    // The id is its task's. \`is_report_open\`: a bounce of the forwarded email is still to be told to the author.
    // \`looped_email_id\`: the message came back as this email of ours. \`repeat_key\`: of its
    // recipient, Message-ID and Date; null: not counted.
    // \`reported_positions\`: of those deliveries the author has heard by a bounce that was sent on.
    this.addSql(`
      create table forwarding_attempt (
        tenant_id uuid not null,
        id uuid not null,
        received_email_id uuid not null,
        rule_id uuid not null,
        recipient text not null,
        destinations jsonb not null,
        status text not null check (status in ('queued', 'skipped', 'failed')),
        reason text,
        explanation text not null,
        method text check (method in ('relayed', 'rebuilt')),
        email_id uuid,
        replay_id uuid,
        is_report_open boolean not null default false,
        reported_positions smallint[] not null default '{}',
        looped_email_id uuid,
        repeat_key bytea,
        created_at timestamptz not null,
        primary key (tenant_id, id),
        check ((status = 'queued') = (email_id is not null))
      )`);
    this.addSql(`
      create index forwarding_attempt_rule on forwarding_attempt (tenant_id, rule_id, id desc)`);
    this.addSql(`
      create index forwarding_attempt_received on forwarding_attempt
        (tenant_id, received_email_id, id)`);
    this.addSql(`
      create index forwarding_attempt_email on forwarding_attempt (tenant_id, email_id)
        where email_id is not null`);
    this.addSql(`
      create index forwarding_attempt_looped on forwarding_attempt (tenant_id, looped_email_id)
        where looped_email_id is not null`);
    this.addSql(`
      create index forwarding_attempt_repeat on forwarding_attempt (tenant_id, rule_id, repeat_key)
        where repeat_key is not null`);
    this.addSql(`
      create index forwarding_attempt_open on forwarding_attempt (tenant_id, id)
        where is_report_open`);
    this.addSql(`
      create index forwarding_attempt_replay on forwarding_attempt (tenant_id, replay_id, status)
        where replay_id is not null`);
    // \`paced_at\`: when the next message is due.
    this.addSql(`
      create table receiving_replay (
        tenant_id uuid not null references tenant (id),
        id uuid not null,
        rule_id uuid,
        status text not null check (status in ('running', 'finished', 'canceled')),
        per_minute integer not null,
        ids jsonb,
        starts_at timestamptz,
        ends_at timestamptz,
        cursor_id uuid,
        planned integer not null default 0,
        skipped integer not null default 0,
        paced_at timestamptz not null,
        created_at timestamptz not null,
        updated_at timestamptz not null,
        primary key (tenant_id, id)
      )`);
    this.addSql(`
      create index receiving_replay_running on receiving_replay (paced_at)
        where status = 'running'`);
    // Mail that came to a rewritten sender and was sent on: not twice, and not without measure. \`is_proven\`: it told of a
    // failure that nobody had told of before.
    this.addSql(`
      create table forward_return (
        digest bytea primary key,
        sender text not null,
        is_proven boolean not null,
        at timestamptz not null
      )`);
    this.addSql(`create index forward_return_sender on forward_return (sender, at)`);
    this.addSql(`create index forward_return_at on forward_return (at)`);
    // Hosts that were asked to come again; of no tenant, since it is decided before anything is stored.
    this.addSql(`
      create table greylist (
        key bytea primary key,
        first_at timestamptz not null,
        last_at timestamptz not null,
        passed_at timestamptz
      )`);
    this.addSql(`create index greylist_last on greylist (last_at)`);

    this.addSql(`
      alter table sending_domain
        add column inbound_dmarc text not null default 'reject'
          check (inbound_dmarc in ('reject', 'tag'))`);
    // \`answers_email_id\`: the sent email that it is a reply to. \`is_partial\`: not all of it could be read.
    this.addSql(`
      alter table received_email
        add column authentication jsonb,
        add column answers_email_id uuid,
        add column is_partial boolean not null default false,
        add column remote_address text,
        add column helo text`);
    // The same bytes from the same sender for the same recipients, a while ago: apart, so that the index with its random
    // keys stays small.
    this.addSql(`
      create table received_digest (
        tenant_id uuid not null,
        digest bytea not null,
        email_id uuid not null,
        received_at timestamptz not null,
        primary key (tenant_id, digest)
      )`);
    this.addSql(`create index received_digest_age on received_digest (received_at)`);
    this.addSql(`
      create index received_email_answers on received_email (tenant_id, answers_email_id)
        where answers_email_id is not null`);
    // How many bytes of the raw message are our own trace fields, on top of what came.
    this.addSql(`
      alter table received_content add column trace_size_bytes integer not null default 0`);
    // MAIL FROM where it is not a return path of ours: empty for the null sender. \`may_go_unsigned\`: it carries its
    // author's signature, or none can be made.
    this.addSql(`
      alter table email_content
        add column envelope_from text,
        add column may_go_unsigned boolean not null default false`);
  }
}
