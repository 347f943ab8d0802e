// Templates and the versions of their content.
import { Migration } from '@mikro-orm/migrations';

export class Templates extends Migration {
  override up(): void {
    this.addSql(`
      create table template (
        tenant_id uuid not null references tenant (id),
        id uuid not null,
        name text not null,
        alias text,
        status text not null check (status in ('draft', 'published')),
        current_version_id uuid not null,
        published_version_id uuid,
        published_at timestamptz,
        created_at timestamptz not null,
        updated_at timestamptz not null,
        primary key (tenant_id, id),
        unique (tenant_id, alias),
        check ((status = 'published') = (published_version_id is not null))
      )`);

    this.addSql(`
      create table template_version (
        tenant_id uuid not null,
        id uuid not null,
        template_id uuid not null,
        from_given text,
        reply_to_given jsonb not null,
        subject text,
        preview_text text,
        html text not null,
        text text,
        variables jsonb not null,
        size_bytes integer not null,
        created_at timestamptz not null,
        primary key (tenant_id, id),
        foreign key (tenant_id, template_id) references template (tenant_id, id) on delete cascade
      )`);
    this.addSql(
      `create index template_version_template on template_version (tenant_id, template_id)`,
    );
  }
}
