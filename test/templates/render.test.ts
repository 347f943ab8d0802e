// Filling published templates with values, on a real database: what stands where, what is refused, and that
// neither values nor edits meanwhile change more than they should.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { ensureFirstTenant } from '../../src/access/first-tenant.ts';
import { Refusal } from '../../src/access/refusal.ts';
import { newId } from '../../src/store/id.ts';
import { openStore, type Store } from '../../src/store/orm.ts';
import type { CreateTemplateRequest } from '../../src/templates/content.ts';
import {
  createTemplateRenderer,
  type RenderedTemplate,
  type TemplateRenderer,
} from '../../src/templates/render.ts';
import { createTemplateVerbs, type TemplateVerbs } from '../../src/templates/templates.ts';
import { migratedDatabase, type FreshDatabase } from '../support/postgres.ts';
import { silent } from '../support/queue.ts';

const test = suite('render');
let database: FreshDatabase;
let store: Store;
let verbs: TemplateVerbs;
let renderer: TemplateRenderer;
let tenantId: string;

test.before(async () => {
  database = await migratedDatabase();
  store = await openStore({ url: database.url, log: silent, connectionsMax: 4, migrate: true });
  ({ tenantId } = await ensureFirstTenant(store, null));
  verbs = createTemplateVerbs(store, () => new Date());
  renderer = createTemplateRenderer(store);
});
test.after(async () => {
  await store.close();
  await database.drop();
});

async function publish(about: Partial<CreateTemplateRequest>): Promise<string> {
  const id = await verbs.create(tenantId, { name: 'T', html: '<p></p>', ...about });
  return verbs.publish(tenantId, id);
}

const NO_LINK = { whyNot: 'it has no link' };
const render = (id: string, variables: Record<string, unknown> = {}): Promise<RenderedTemplate> =>
  renderer.render(tenantId, { id, variables }, NO_LINK);

async function refusalOf(work: Promise<unknown>): Promise<Refusal> {
  try {
    await work;
  } catch (error) {
    assert.instance(error, Refusal, String(error));
    return error as Refusal;
  }
  throw new Error('it was not refused');
}
const pathsOf = (refusal: Refusal): string[] => refusal.issues.map(({ path }) => path);

test('values stand in subject, html and text, by id and by alias', async () => {
  const id = await publish({
    alias: 'welcome',
    from: 'Ada <ada@x.test>',
    reply_to: ['b@x.test', 'c@x.test'],
    subject: 'Hi {{{NAME}}}',
    html: '<p>{{{NAME}}} has {{{COUNT}}}; {{{NAME}}}</p>',
    text: '{{{COUNT}}}',
    variables: [{ key: 'NAME' }, { key: 'COUNT', type: 'number' }],
  });
  const expected = {
    templateId: id,
    from: 'Ada <ada@x.test>',
    replyTo: ['b@x.test', 'c@x.test'],
    subject: 'Hi Bob',
    html: '<p>Bob has -1.5; Bob</p>',
    text: '-1.5',
  };
  for (const name of [id, id.toUpperCase(), 'welcome']) {
    assert.equal(await render(name, { NAME: 'Bob', COUNT: -1.5, other: {} }), expected);
  }
});

test('what the template does not say is null', async () => {
  const id = await publish({ html: 'x' });
  const empty = { templateId: id, from: null, replyTo: [], subject: null, html: 'x', text: null };
  assert.equal(await render(id), empty);
});

test('a value is verbatim and never looked at again', async () => {
  const id = await publish({
    html: '{{{A}}}{{{B}}}{',
    variables: [{ key: 'A' }, { key: 'B', fallback_value: '{{{A}}}' }],
  });
  for (const value of ['<b>&"', '$&$1$$', '{{{B}}}', '{{{', '}}}', '\r\n\t']) {
    assert.is((await render(id, { A: value })).html, `${value}{{{A}}}{`);
  }
});

test('a value, the default of the place, the fallback of the variable: the first there is', async () => {
  const id = await publish({
    html: '{{{A|own}}} {{{A}}} {{{B|own}}} {{{C}}} {{{D|own}}}',
    variables: [
      { key: 'A', fallback_value: 'fallback' },
      { key: 'B' },
      { key: 'C', required: false },
    ],
  });
  assert.is((await render(id)).html, 'own fallback own  own');
  assert.is((await render(id, { A: null, C: null })).html, 'own fallback own  own');
  assert.is((await render(id, { A: '', B: '', C: 'c', D: 4 })).html, '   c 4');
});

test('every type is written as text', async () => {
  const id = await publish({
    html: '{{{N}}}|{{{B}}}|{{{O}}}|{{{L}}}',
    variables: [
      { key: 'N', type: 'number', fallback_value: 0 },
      { key: 'B', type: 'boolean', fallback_value: false },
      { key: 'O', type: 'object', fallback_value: {} },
      { key: 'L', type: 'list', fallback_value: [] },
    ],
  });
  assert.is((await render(id)).html, '0|false|{}|[]');
  const values = { N: 2 ** 53 - 1, B: true, O: { a: 'ü' }, L: [1, 'b'] };
  assert.is((await render(id, values)).html, '9007199254740991|true|{"a":"ü"}|[1,"b"]');
});

test('everything that is missing or wrong is listed', async () => {
  const id = await publish({
    subject: '{{{S}}}',
    html: '{{{A}}}{{{A|x}}}{{{U|x}}}',
    variables: [
      { key: 'S' },
      { key: 'A' },
      { key: 'N', type: 'number' },
      { key: 'UNUSED' },
      { key: 'L' },
      { key: 'F', fallback_value: 'x' },
    ],
  });
  const refusal = await refusalOf(
    render(id, { S: 'a\r\nBcc: c@x.test', N: '1', L: 'x'.repeat(2_001), F: 1, U: {} }),
  );
  assert.is(refusal.code, 'validation_error');
  const keys = ['S', 'A', 'N', 'UNUSED', 'L', 'F', 'U'];
  assert.equal(
    pathsOf(refusal),
    keys.map((key) => `template.variables.${key}`),
  );
  for (const { path, message } of refusal.issues) assert.ok(message.includes(`\`${path}\``));
});

test('a value of the wrong type is refused', async () => {
  const wrong = {
    string: [1, true, {}, [], 'a\0b', '\ud800'],
    number: ['1', true, 2 ** 53, Infinity, {}],
    boolean: ['true', 1, []],
    object: ['{}', [], { a: 'x'.repeat(2_000) }],
    list: ['[]', {}, Array.from({ length: 1_001 }, () => 1)],
  };
  for (const [type, values] of Object.entries(wrong)) {
    const id = await publish({
      html: '{{{V}}}',
      variables: [{ key: 'V', type: type as 'string' }],
    });
    for (const V of values) {
      const refusal = await refusalOf(render(id, { V }));
      assert.equal(pathsOf(refusal), ['template.variables.V'], `${type}: ${String(V)}`);
    }
  }
});

test('a control character cannot come into the subject; a tab can', async () => {
  const id = await publish({
    subject: '{{{S}}}{{{U|x}}}',
    variables: [{ key: 'S' }],
    html: '{{{S}}}',
  });
  for (const value of ['\r', '\n', '\u0000', '\u001b', '\u007f']) {
    assert.equal(pathsOf(await refusalOf(render(id, { S: value }))), ['template.variables.S']);
    const refusal = await refusalOf(render(id, { S: 's', U: value }));
    assert.equal(pathsOf(refusal), ['template.variables.U']);
  }
  assert.is((await render(id, { S: 'a\tb' })).subject, 'a\tbx');
});

test('names that every object has are no values', async () => {
  const id = await publish({
    html: '{{{valueOf_|x}}}{{{A}}}',
    variables: [{ key: 'A', fallback_value: 'a' }],
  });
  const inherited = Object.create({ A: 'inherited' }) as Record<string, unknown>;
  assert.is((await render(id, inherited)).html, 'xa');
  const own = JSON.parse('{"__proto__": {"A": "p"}, "constructor": "c"}') as Record<
    string,
    unknown
  >;
  assert.is((await render(id, own)).html, 'xa');
});

test('values cannot make a text larger than an email may be', async () => {
  const id = await publish({ html: '{{{A}}}'.repeat(10_000), variables: [{ key: 'A' }] });
  assert.is((await render(id, { A: 'x'.repeat(500) })).html?.length, 5_000_000);
  const refusal = await refusalOf(render(id, { A: 'x'.repeat(2_000) }));
  assert.equal(pathsOf(refusal), ['template.variables']);
  assert.match(refusal.message, /`html` has more than 5242880 bytes/);
});

test('a draft is refused, what is unknown or foreign is not found', async () => {
  const id = await verbs.create(tenantId, { name: 'T', html: 'x', alias: 'draft' });
  for (const name of [id, 'draft']) {
    const refusal = await refusalOf(render(name));
    assert.is(refusal.code, 'template_not_published');
    assert.is(refusal.errorName, 'validation_error');
    assert.is(refusal.status, 422);
  }
  const mine = await publish({ alias: 'mine' });
  for (const name of [newId(), 'nobody', '', 'not an alias', 'a\0b', 'x'.repeat(1_000)]) {
    const refusal = await refusalOf(render(name));
    assert.is(refusal.code, 'not_found', name);
    assert.is(refusal.message, 'Template not found');
  }
  for (const name of [mine, 'mine']) {
    const foreign = renderer.render(newId(), { id: name, variables: {} }, NO_LINK);
    assert.is((await refusalOf(foreign)).message, 'Template not found');
  }
});

test('what was published is sent until the next publication, and not after an end of it', async () => {
  const id = await publish({ html: 'one' });
  assert.is((await render(id)).html, 'one');
  await verbs.update(tenantId, id, { html: 'two' });
  await verbs.update(tenantId, id, { html: 'three' });
  assert.is((await render(id)).html, 'one');
  assert.is(
    (await createTemplateRenderer(store).render(tenantId, { id, variables: {} }, NO_LINK)).html,
    'one',
  );
  await verbs.publish(tenantId, id);
  assert.is((await render(id)).html, 'three');
  await verbs.update(tenantId, id, { status: 'draft' });
  assert.is((await refusalOf(render(id))).code, 'template_not_published');
  await verbs.update(tenantId, id, { status: 'published', html: 'four' });
  assert.is((await render(id)).html, 'four');
  await verbs.remove(tenantId, id);
  assert.is((await refusalOf(render(id))).code, 'not_found');
});

test('of all versions two are kept', async () => {
  const id = await publish({ html: 'one' });
  for (const html of ['two', 'three', 'four']) await verbs.update(tenantId, id, { html });
  await verbs.update(tenantId, id, { html: 'four', name: 'Renamed' });
  const { rows } = await store.pool.query(
    'select html from template_version where template_id = $1 order by id',
    [id],
  );
  assert.equal(rows, [{ html: 'one' }, { html: 'four' }]);
  await verbs.publish(tenantId, id);
  const { rowCount } = await store.pool.query(
    'select 1 from template_version where template_id = $1',
    [id],
  );
  assert.is(rowCount, 1);
});

test('changes at the same time all count, and rendering meanwhile always works', async () => {
  const id = await publish({ html: '0' });
  const fields = ['name', 'subject', 'preview_text', 'text', 'alias', 'from'] as const;
  const values = {
    name: 'n',
    subject: 's',
    preview_text: 'p',
    text: 't',
    alias: 'all',
    from: 'a@x.test',
  };
  const changes = fields.map((field) => verbs.update(tenantId, id, { [field]: values[field] }));
  const edits = Array.from({ length: 10 }, async (_, n) => {
    await verbs.update(tenantId, id, { html: String(n), status: 'published' });
    return createTemplateRenderer(store).render(tenantId, { id, variables: {} }, NO_LINK);
  });
  for (const { html } of await Promise.all(edits)) assert.match(html ?? '', /^\d$/);
  await Promise.all(changes);
  const { name, alias, content } = await verbs.find(tenantId, id);
  assert.equal(
    {
      name,
      alias,
      subject: content.subject,
      preview_text: content.previewText,
      text: content.text,
      from: content.fromGiven,
    },
    values,
  );
});

test('two templates that exchange their aliases at the same time: each keeps one or is told', async () => {
  const [a, b] = await Promise.all([publish({ alias: 'left' }), publish({ alias: 'right' })]);
  const results = await Promise.allSettled([
    verbs.update(tenantId, a, { alias: 'right' }),
    verbs.update(tenantId, b, { alias: 'left' }),
  ]);
  const failed = results.filter((result) => result.status === 'rejected');
  assert.ok(failed.length >= 1);
  for (const { reason } of failed)
    assert.is((reason as Refusal).code, 'alias_taken', String(reason));
});

test.run();
