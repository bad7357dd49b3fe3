# Ferry as an image: docker build -t ferry:0.1.0 .
#
# Runs as uid 10001 with a read-only root; nothing is written unless ferry.yaml names a folder for it (/var/lib/ferry is
# there for that). Models of `kind: python` need a Python, which is not in here: FROM ferry:0.1.0, and add it.
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
ENV NODE_ENV=production
RUN groupadd --gid 10001 ferry \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/ferry --shell /usr/sbin/nologin ferry \
 && install --directory --owner=10001 --group=10001 --mode=0700 /var/lib/ferry
WORKDIR /opt/ferry
COPY package.json LICENSE ./
COPY --from=dependencies /opt/ferry/node_modules ./node_modules
COPY --from=build /opt/ferry/dist ./dist
# By number: Kubernetes's runAsNonRoot cannot look up a name.
USER 10001:10001
WORKDIR /etc/ferry
EXPOSE 8080 8081
STOPSIGNAL SIGTERM
# No HEALTHCHECK: whoever runs it asks /healthz and /readyz at the admin listener.
ENTRYPOINT ["node", "/opt/ferry/dist/cli.js"]
CMD ["serve", "-c", "/etc/ferry/ferry.yaml"]
