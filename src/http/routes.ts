// Which paths and methods the API has, read from the generated OpenAPI document, so that an unknown path is
// a 404 and a wrong method a 405 before anything else is looked at, with or without a key.

interface OpenApiDocument {
  readonly paths: Readonly<Record<string, Readonly<Record<string, unknown>>>>;
}

export interface RouteTable {
  /** The methods of a path without `/api`, or null when there is no such path. */
  methodsOf(path: string): readonly string[] | null;
}

const METHODS = ['get', 'post', 'put', 'patch', 'delete'];

export function createRouteTable(document: OpenApiDocument): RouteTable {
  const routes = Object.entries(document.paths).map(([template, operations]) => ({
    pattern: new RegExp(
      `^${template
        .split('/')
        .map((part) => (/^\{.*\}$/.test(part) ? '[^/]+' : part.replace(/[^A-Za-z0-9_-]/g, '\\$&')))
        .join('/')}/?$`,
    ),
    methods: METHODS.filter((method) => method in operations).map((method) => method.toUpperCase()),
  }));
  return {
    methodsOf(path) {
      const methods = routes
        .filter(({ pattern }) => pattern.test(path))
        .flatMap((route) => route.methods);
      return methods.length === 0 ? null : [...new Set(methods)];
    },
  };
}
