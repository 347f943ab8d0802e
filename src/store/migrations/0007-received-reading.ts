// A received message is stored before it has been read; what waits for its reader is found again after a crash.
import { Migration } from '@mikro-orm/migrations';

export class ReceivedReading extends Migration {
  override up(): void {
    this.addSql(`alter table received_email add column is_read boolean not null default true`);
    this.addSql(`
      create index received_email_unread on received_email (tenant_id, id) where not is_read`);
  }
}
