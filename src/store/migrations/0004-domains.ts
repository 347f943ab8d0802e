// What a sending domain has beyond its name: settings, what the DNS last showed for each of its records and
// when it is looked at again; and claims of names that another tenant holds. That a name is verified for
// one tenant only is decided under a lock on the name (domains/rows.ts), not by a constraint,
// since a constraint over tenants could not be distributed by tenant.
import { Migration } from '@mikro-orm/migrations';

/** What a domain has that was verified before its records were looked at one by one. */
const VERIFIED = [
  'dkim_rsa',
  'dkim_ed25519',
  'return_path_mx',
  'return_path_spf',
  'receiving_mx',
  'dmarc',
];

export class Domains extends Migration {
  override up(): void {
    this.addSql(`
      alter table sending_domain
        add column tracking_subdomain text,
        add column open_tracking boolean not null default false,
        add column click_tracking boolean not null default false,
        add column tls text not null default 'opportunistic'
          check (tls in ('opportunistic', 'enforced')),
        add column sending_verified boolean not null default false,
        add column receiving_verified boolean not null default false,
        add column record_checks jsonb not null default '{}',
        add column verifying_since timestamptz,
        add column check_count integer not null default 0,
        add column checked_at timestamptz,
        add column next_check_at timestamptz`);
    // Whose a name is, over all tenants.
    this.addSql(`create index sending_domain_name on sending_domain (name)`);
    this.addSql(`
      create index sending_domain_due on sending_domain (next_check_at)
        where next_check_at is not null`);
    const checks = Object.fromEntries(
      VERIFIED.map((kind) => [kind, { status: 'verified', detail: null, since: null }]),
    );
    this.addSql(`
      update sending_domain set sending_verified = true, receiving_verified = true,
        record_checks = '${JSON.stringify(checks)}' where status = 'verified'`);

    this.addSql(`
      create table domain_claim (
        tenant_id uuid not null,
        id uuid not null,
        domain_id uuid not null,
        name text not null,
        token text not null,
        status text not null check (status in
          ('pending', 'verified', 'completed', 'blocked', 'expired', 'superseded', 'canceled', 'failed')),
        blocked_reason text check (blocked_reason in
          ('grace_period', 'recent_owner_activity', 'pending_scheduled_emails')),
        failure_reason text,
        created_at timestamptz not null,
        expires_at timestamptz not null,
        proven_at timestamptz,
        primary key (tenant_id, id),
        foreign key (tenant_id, domain_id) references sending_domain (tenant_id, id) on delete cascade
      )`);
    this.addSql(`create index domain_claim_domain on domain_claim (tenant_id, domain_id, id)`);
    this.addSql(`create index domain_claim_name on domain_claim (name)`);
  }
}
