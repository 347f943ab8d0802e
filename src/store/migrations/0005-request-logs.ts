// The log of API requests, when a key was last used, and the rate limit's shared windows. The rows that
// lists read are narrow: bodies are apart. `request_log_tag` has one row for every tag (`name` and
// `name=value`) of the emails that a request was about, so that a list by tag is a range of its primary key.
// No foreign keys: one statement writes the three log tables, and nothing else does. Retention goes by
// tenant and id.
import { Migration } from '@mikro-orm/migrations';

export class RequestLogs extends Migration {
  override up(): void {
    this.addSql(`alter table api_key add column last_used_at timestamptz`);

    this.addSql(`
      create table request_log (
        tenant_id uuid not null,
        id uuid not null,
        created_at timestamptz not null,
        api_key_id uuid not null,
        method text not null,
        endpoint text not null,
        response_status smallint not null,
        user_agent text,
        request_id text not null,
        duration_ms integer not null,
        email_ids uuid[],
        tags text[],
        primary key (tenant_id, id)
      )`);
    this.addSql(`create index request_log_key on request_log (tenant_id, api_key_id, id)`);
    this.addSql(`create index request_log_status on request_log (tenant_id, response_status, id)`);

    this.addSql(`
      create table request_log_body (
        tenant_id uuid not null,
        log_id uuid not null,
        request_body text,
        response_body text,
        primary key (tenant_id, log_id)
      )`);

    this.addSql(`
      create table request_log_tag (
        tenant_id uuid not null,
        tag text not null,
        log_id uuid not null,
        primary key (tenant_id, tag, log_id)
      )`);

    // The form that rate-limiter-flexible wants. Losing it in a crash only opens new windows.
    this.addSql(`
      create unlogged table rate_limit (
        key varchar(255) primary key,
        points integer not null default 0,
        expire bigint
      ) with (fillfactor = 50)`);
  }
}
