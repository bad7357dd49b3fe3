# Ferry as an image: docker build -t ferry:0.1.0 .
#
# Runs as uid 10001 with a read-only root; nothing is written unless ferry.yaml names a folder for it (/var/lib/ferry is
# there for that). Models of `kind: python` need a Python, which is not in here: FROM ferry:0.1.0, and add it.
# scripts/check-image.ts builds it, runs it and looks whether all of that is so.
ARG NODE=node:26.10.0-bookworm-slim

FROM ${NODE} AS build
WORKDIR /opt/ferry
COPY package.json package-lock.json ./
RUN npm ci
COPY tsconfig.json tsconfig.build.json ./
COPY src ./src
RUN npm run build

FROM ${NODE} AS dependencies
WORKDIR /opt/ferry
COPY package.json package-lock.json ./
RUN npm ci --omit=dev
# What only editors and debuggers read is half of it.
RUN find node_modules -type f \( -name '*.map' -o -name '*.d.ts' -o -name '*.d.mts' -o -name '*.d.cts' \) -delete

FROM ${NODE}
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="ferry" \
      org.opencontainers.image.description="A batching gateway for GPU inference: many single requests in, full batches out." \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.documentation="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Compiled code is not kept: it would lie in /var/lib/ferry, beside the data.
ENV NODE_ENV=production NODE_DISABLE_COMPILE_CACHE=1
RUN groupadd --gid 10001 ferry \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/ferry --shell /usr/sbin/nologin ferry \
 && install --directory --owner=10001 --group=10001 --mode=0700 /var/lib/ferry
WORKDIR /opt/ferry
COPY package.json LICENSE ./
# For `docker exec … ferry workers list`.
COPY bin ./bin
RUN ln --symbolic /opt/ferry/bin/ferry /usr/local/bin/ferry
COPY --from=dependencies /opt/ferry/node_modules ./node_modules
COPY --from=build /opt/ferry/dist ./dist
# Before USER: whoever runs must not own the folder of the config.
WORKDIR /etc/ferry
# By number: Kubernetes's runAsNonRoot cannot look up a name.
USER 10001:10001
EXPOSE 8080 8081
STOPSIGNAL SIGTERM
# PID 1 is Node: it takes its signals, but reaps no orphans. Where models or scaling.command start processes: --init.
# No HEALTHCHECK: whoever runs it asks /healthz and /readyz at the admin listener.
ENTRYPOINT ["node", "/opt/ferry/dist/cli.js"]
CMD ["serve", "-c", "/etc/ferry/ferry.yaml"]
