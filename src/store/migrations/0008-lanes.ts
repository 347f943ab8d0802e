// Lanes, pauses, TLS policies and their results; and an index by which deliveries are claimed destination by
// destination, so that a backlog behind one busy lane is never read through to find another lane's mail.
//
// None of the new tables is a tenant's: they are small, and copied to every node where tenants are distributed.
import { Migration } from '@mikro-orm/migrations';

export class Lanes extends Migration {
  override up(): void {
    this.addSql(`
      alter table delivery
        add column is_bulk boolean not null default false,
        add column lane_faults integer not null default 0,
        add column interruptions smallint not null default 0,
        add column let_in_at timestamptz,
        add column deferred_at timestamptz,
        add column delay_told_at timestamptz`);
    // What may be ending the workers: asked for after every crash, and nearly always empty.
    this.addSql(`
      create index delivery_suspect on delivery (due_at)
        where interruptions >= 2 and state in ('ready', 'in_flight', 'deferred')`);
    this.addSql(`
      create index delivery_let_in on delivery (let_in_at)
        where interruptions >= 2 and state in ('ready', 'in_flight')`);
    this.addSql(`
      create index delivery_claimable on delivery
        (tenant_id, is_bulk, lane, due_at, email_id, position) where state = 'ready'`);
    this.addSql(`drop index delivery_ready`);
    // Dead letters, which the operator's view of the queue counts: rare, so they are in nobody's way.
    this.addSql(`
      create index delivery_dead on delivery (tenant_id, email_id)
        where state = 'failed' or (state = 'bounced' and last_cause = 'expired')
          or (state = 'unknown' and unknowns >= 2)`);
    // Which source address was used, and which TLS policy was in force.
    this.addSql(`
      alter table attempt
        add column source text,
        add column tls_policy text`);

    this.addSql(`
      create table lane (
        name text primary key,
        egress text not null,
        site text not null,
        provider text,
        circuit text not null default 'closed' check (circuit in ('closed', 'open', 'half_open')),
        opened_at timestamptz,
        open_until timestamptz,
        opens integer not null default 0,
        reason text,
        limited_by text,
        connections integer not null default 0,
        connections_max integer not null default 0,
        concurrency real not null default 0,
        queued integer not null default 0,
        in_flight integer not null default 0,
        last_success_at timestamptz,
        last_failure_at timestamptz,
        reported_at timestamptz not null
      )`);
    // What a delivery's lane column says -> the lane that serves it, as last resolved.
    this.addSql(`
      create table lane_destination (
        destination text not null,
        lane text not null,
        seen_at timestamptz not null,
        primary key (destination, lane)
      )`);
    this.addSql(`create index lane_destination_of on lane_destination (lane)`);
    this.addSql(`
      create table pause (
        id uuid primary key,
        kind text not null check (kind in ('lane', 'destination', 'tenant', 'all')),
        name text not null,
        reason text,
        paused_at timestamptz not null,
        until timestamptz,
        unique (kind, name)
      )`);
    this.addSql(`
      create table egress (
        name text primary key,
        blocked_since timestamptz,
        reason text,
        last_success_at timestamptz,
        -- Addresses that could not be connected to: dialled again to see whether the port has opened.
        silent text[] not null default '{}',
        probed_at timestamptz,
        reported_at timestamptz not null
      )`);

    this.addSql(`
      create table sts_policy (
        domain text primary key,
        policy_id text not null,
        mode text not null check (mode in ('enforce', 'testing', 'none')),
        mx jsonb not null,
        raw text not null,
        max_age_seconds integer not null,
        fetched_at timestamptz not null,
        checked_at timestamptz not null,
        expires_at timestamptz not null,
        last_used_at timestamptz not null,
        last_error text
      )`);
    this.addSql(`create index sts_policy_checked on sts_policy (checked_at)`);
    this.addSql(`
      create table tls_result (
        day date not null,
        domain text not null,
        policy jsonb not null,
        policy_hash text not null,
        mx_host text not null,
        receiving_ip text not null,
        sending_ip text not null,
        result text not null,
        reason text,
        sessions bigint not null,
        primary key (day, domain, policy_hash, mx_host, receiving_ip, sending_ip, result)
      )`);
    // One of our TLS reports: it goes out whatever the policy of its destination says.
    this.addSql(`
      alter table email_content add column ignores_tls_policy boolean not null default false`);
    this.addSql(`
      create table tls_report (
        day date not null,
        domain text not null,
        state text not null check (state in ('pending', 'sent', 'failed', 'nobody')),
        attempts integer not null default 0,
        due_at timestamptz not null,
        started_at timestamptz,
        targets jsonb not null default '{}',
        detail text,
        primary key (day, domain)
      )`);
    this.addSql(`create index tls_report_due on tls_report (due_at) where state = 'pending'`);
  }
}
