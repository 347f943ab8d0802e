// What the appliance knows of itself, none of it a tenant's: certificates, findings of the doctor, which processes run,
// what workers share of a lane's limits, and facts there is one of.
import { Migration } from '@mikro-orm/migrations';

export class ApplianceTables extends Migration {
  override up(): void {
    // First what takes long: from the first `alter table` on, processes of the release before wait for the end of this.
    // Whether a forward waits for a received email that is to be removed.
    this.addSql(`
      create index forwarding_task_received on forwarding_task (tenant_id, received_email_id)`);
    // Of whose readers the addresses are still known; it grows at its end only.
    this.addSql(`
      create index engagement_personal on engagement (tenant_id, at)
        where remote_address is not null or user_agent is not null`);

    // Facts of which the whole appliance has one each, such as which blob store its rows point into.
    this.addSql(`
      create table appliance_fact (
        name text primary key,
        value text not null,
        created_at timestamptz not null default now()
      )`);

    // Processes that run roles of this appliance, each with a heartbeat.
    this.addSql(`
      create table appliance_process (
        id uuid primary key,
        host text not null,
        pid integer not null,
        roles text[] not null,
        version text not null,
        started_at timestamptz not null,
        seen_at timestamptz not null default now()
      )`);

    // What worker runs share of a lane's limits: the connections that each may have at a time, `{epoch: [held, wanted]}`,
    // and the circuit that one of them opened for all. One row a lane: a run replaces the row that it has read, or does
    // nothing. What runs hold counts until worker.shares_until.
    this.addSql(`
      create table lane_share (
        lane text primary key,
        etag uuid not null,
        replaces uuid,
        shares jsonb not null,
        open_id uuid,
        open_by uuid,
        open_until timestamptz,
        opens integer not null default 0,
        reason text,
        changed_at timestamptz not null default now()
      ) with (fillfactor = 70)`);
    this.addSql(`alter table worker add column shares_until timestamptz`);

    // Names that are certified by ACME. The key is sealed with the master secret.
    this.addSql(`
      create table certificate (
        name text primary key,
        chain text,
        sealed_key bytea,
        not_before timestamptz,
        not_after timestamptz,
        next_try_at timestamptz not null default now(),
        failures integer not null default 0,
        last_error text,
        wanted_at timestamptz not null default now(),
        leased_until timestamptz
      )`);
    this.addSql(`
      create table acme_account (
        directory text primary key,
        sealed_key bytea not null,
        url text,
        contact text,
        paused_until timestamptz
      )`);
    // Orders of the last hours: authorities limit how many there may be.
    this.addSql(`
      create table acme_order (
        ordered_at timestamptz not null,
        name text not null
      )`);
    this.addSql(`create index acme_order_at on acme_order (ordered_at)`);
    // Any process with the API answers for the one that orders.
    this.addSql(`
      create table acme_challenge (
        token text primary key,
        key_authorization text not null,
        expires_at timestamptz not null
      )`);
    // The MTA-STS policy that we serve for a receiving domain.
    this.addSql(`
      alter table sending_domain add column mta_sts text not null default 'off'
        check (mta_sts in ('off', 'none', 'testing', 'enforce'))`);

    // A tenant that came from another appliance: however old its id is, it is not the first tenant of this one.
    this.addSql(`alter table tenant add column imported_at timestamptz`);

    // What the doctor found when it last looked. `check_name`: of the check that says it; `misses`: looks in a row that brought
    // no answer; `seen_at`: when it was last seen to be so, `looked_at` when it was last looked for.
    this.addSql(`
      create table finding (
        id uuid not null,
        check_name text not null,
        domain_id uuid,
        misses integer not null default 0,
        looked_at timestamptz not null,
        code text not null,
        subject text not null,
        severity text not null,
        message text not null,
        advice text,
        detail jsonb not null default '{}',
        since timestamptz not null,
        seen_at timestamptz not null,
        primary key (code, subject)
      )`);
    this.addSql(`create index finding_domain on finding (domain_id) where domain_id is not null`);

    // What was removed by age (retention/). `content_removed_at`: the record stays, what it says is gone.
    this.addSql(`alter table email add column content_removed_at timestamptz`);
    this.addSql(`alter table received_email add column content_removed_at timestamptz`);
    // What metrics count of emails that are not there any more, beside metric_quarter and in its words: whoever counts a
    // quarter of an hour anew adds it. `accepted`: sent emails.
    this.addSql(`
      create table metric_removed (
        tenant_id uuid not null,
        quarter timestamptz not null,
        domain text not null,
        broadcast_id uuid not null,
        accepted integer not null,
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
  }
}
