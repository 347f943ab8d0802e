// The whole of the dependency injection: tsoa asks for a controller, we build it from the verbs that
// the composition root put into the app.
import type { IocContainer, IocContainerFactory } from '@tsoa/runtime';
import type { Request } from 'express';
import type { Verbs } from './verbs.ts';

export const iocContainer: IocContainerFactory<Request> = (request) =>
  ({
    get: (controller: unknown) =>
      new (controller as new (verbs: Verbs) => never)(request.app.locals['verbs'] as Verbs),
  }) as IocContainer;
