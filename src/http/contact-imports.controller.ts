// Imports of contacts from files.
import {
  Controller,
  Example,
  Get,
  OperationId,
  Path,
  Post,
  Query,
  Request,
  Response,
  Route,
  Security,
  SuccessResponse,
  Tags,
} from '@tsoa/runtime';
import type express from 'express';
import { checkId, checkLimitText } from '../access/page.ts';
import { Refusal } from '../access/refusal.ts';
import { refuseMissingFile } from '../audience/import-request.ts';
import type { ImportRecord } from '../audience/imports.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import { noteFields } from './request-log.ts';
import { readUpload } from './upload.ts';
import type { Verbs } from './verbs.ts';

/** The import that was begun. */
export interface ContactImportCreated {
  object: 'contact_import';
  id: string;
}

/** What became of the rows so far; empty rows are not counted. */
export interface ContactImportCounts {
  /** All that were read. */
  total: number;
  created: number;
  updated: number;
  /** The contact was there, and `on_conflict` is `skip`. */
  skipped: number;
  /** Not stored; see `errors`. */
  failed: number;
}

/** A file of contacts on its way. */
export interface ContactImport {
  object: 'contact_import';
  id: string;
  status: 'queued' | 'in_progress' | 'completed' | 'failed';
  created_at: Date;
  /** When it was completed, or failed. */
  completed_at: Date | null;
  counts: ContactImportCounts;
  /** Of the file, in bytes. */
  size: number;
  /** Of the file, in bytes; the contacts up to there are stored. */
  read: number;
  /** Why it failed as a whole; the contacts of the rows before stay. */
  failure: string | null;
}

/** A row that was not stored. */
export interface ContactImportError {
  /** As a spreadsheet counts: the first line is 1. */
  row: number;
  message: string;
}

/** An import with the first rows that were not stored. */
export interface ContactImportWithErrors extends ContactImport {
  /** At most 100. */
  errors: ContactImportError[];
}

export interface ContactImportList {
  object: 'list';
  data: ContactImport[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

@Route('contacts/imports')
@Tags('Contacts')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away, or too many files are arriving at once')
export class ContactImportsController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /**
   * Imports contacts from a CSV file in UTF-8, with a header line and commas, semicolons or tabs. The answer comes when
   * the file is stored; its rows become contacts afterwards, and the counts of the import tell how far it is. Webhooks are
   * not told of imported contacts. `on_conflict` is `upsert` where it is absent: who sends a file again, corrected, means
   * it, and empty cells change nothing; with `skip` a contact that is there stays as it is, its segments and topics too.
   * At most 20 imports may be open at a time.
   */
  @Post()
  @OperationId('createContactImport')
  @SuccessResponse(201, 'Stored')
  @Response<ErrorEnvelope>(400, 'The body is not a whole form')
  @Response<ErrorEnvelope>(413, 'The file is larger than 100 MiB')
  @Response<ErrorEnvelope>(
    422,
    'The file is missing or has no column of addresses, or a field is wrong',
  )
  @Example<ContactImportCreated>({
    object: 'contact_import',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
  })
  async create(@Request() request: express.Request): Promise<ContactImportCreated> {
    const { tenantId } = callerOf(request);
    const { contactImports } = this.verbs;
    const { file, fields } = await readUpload(request, tenantId, { target: contactImports });
    noteFields(request, fields);
    if (file === null) throw refuseMissingFile();
    const id = await contactImports.create(tenantId, file, fields);
    this.setStatus(201);
    return { object: 'contact_import', id };
  }

  /**
   * Lists imports, newest first.
   * @param limit 1 to 100, default 20.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   * @param status Only imports that are `queued`, `in_progress`, `completed` or `failed`.
   */
  @Get()
  @OperationId('listContactImports')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit, cursor or status')
  @Example<ContactImportList>({
    object: 'list',
    has_more: false,
    data: [
      {
        object: 'contact_import',
        id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
        status: 'in_progress',
        created_at: new Date('2026-05-06T09:00:00.000Z'),
        completed_at: null,
        counts: { total: 12_500, created: 12_000, updated: 499, skipped: 0, failed: 1 },
        size: 3_145_728,
        read: 1_048_576,
        failure: null,
      },
    ],
  })
  async list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
    @Query() status?: string,
  ): Promise<ContactImportList> {
    checkLimitText(request.query['limit']);
    const { items, hasMore } = await this.verbs.contactImports.list(
      callerOf(request).tenantId,
      { limit, after, before },
      status ?? null,
    );
    return { object: 'list', data: items.map(present), has_more: hasMore };
  }

  /** Retrieves an import, with the first rows that were not stored. */
  @Get('{id}')
  @OperationId('getContactImport')
  @SuccessResponse(200, 'The import')
  @Response<ErrorEnvelope>(404, 'No such import')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<ContactImportWithErrors>({
    object: 'contact_import',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    status: 'completed',
    created_at: new Date('2026-05-06T09:00:00.000Z'),
    completed_at: new Date('2026-05-06T09:00:04.000Z'),
    counts: { total: 3, created: 1, updated: 1, skipped: 0, failed: 1 },
    size: 120,
    read: 120,
    failure: null,
    errors: [{ row: 3, message: 'Invalid `email` field: the address is not valid Unicode text.' }],
  })
  async get(
    @Request() request: express.Request,
    @Path() id: string,
  ): Promise<ContactImportWithErrors> {
    const found = await this.verbs.contactImports.find(callerOf(request).tenantId, checkId(id));
    if (found === null) throw new Refusal('not_found', 'Contact import not found');
    return { ...present(found.record), errors: found.errors.map((error) => ({ ...error })) };
  }
}

const present = (record: ImportRecord): ContactImport => ({
  object: 'contact_import',
  id: record.id,
  status: record.status,
  created_at: record.createdAt,
  completed_at: record.completedAt,
  counts: { ...record.counts },
  size: record.sizeBytes,
  read: record.readBytes,
  failure: record.failure,
});
