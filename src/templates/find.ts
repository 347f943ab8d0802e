// Finds a template by the name that a path or an email gives it: its id or its alias.
import { isUuid } from '../store/id.ts';

/** Letters, digits, dashes and underscores; a UUID is never one, so that an id means one template. */
export const ALIAS = /^[A-Za-z0-9_-]{1,128}$/;

/** The condition for the tenant's template of this id or alias; null when no template can have it. */
export function whereIs(
  tenantId: string,
  idOrAlias: string,
): { tenantId: string; id: string } | { tenantId: string; alias: string } | null {
  if (isUuid(idOrAlias)) return { tenantId, id: idOrAlias.toLowerCase() };
  return ALIAS.test(idOrAlias) ? { tenantId, alias: idOrAlias } : null;
}
