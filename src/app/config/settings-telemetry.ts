/** The part of the table that says what Ferry tells about itself, and to whom. */
import { postgresUrl, url } from "./setting-addresses.ts";
import { boolean, choice, group, integer, number, optional } from "./setting-kinds.ts";

const second = 1000;
const minute = 60 * second;

export const requestLog = group("A row for every request, written beside its path and never in it.", {
  url: optional(
    postgresUrl(
      "The PostgreSQL to write to; left out: only the latest are kept, in memory.",
      "${POSTGRES_URL}",
    ),
  ),
  recent: integer("How many of the latest requests are kept in memory; 0: none.", {
    default: 10_000,
    min: 0,
    max: 1_000_000,
  }),
  flushMs: integer("How long a row waits for others before they are written together.", {
    default: second,
    min: 10,
    max: minute,
    unit: "ms",
  }),
  maxBufferedRows: integer("Rows that wait while PostgreSQL is away; the oldest are dropped and counted.", {
    default: 100_000,
    min: 1000,
    max: 10_000_000,
  }),
  writeTimeoutMs: integer("How long PostgreSQL may take to write some rows before they are tried again.", {
    default: 10 * second,
    min: 100,
    max: 10 * minute,
    unit: "ms",
  }),
  retentionDays: integer("How long rows are kept; 0: for ever.", {
    default: 30,
    min: 0,
    max: 36_500,
    unit: "days",
  }),
});

export const telemetry = group("What Ferry tells about itself.", {
  metrics: boolean("Whether /metrics is kept, for Prometheus.", true),
  dashboard: boolean("Whether the dashboard and its stream are kept.", true),
  maxViewers: integer("Dashboards that may watch at once.", { default: 20, min: 1, max: 1000 }),
  otlpUrl: optional(
    url(
      "Where traces go: an OTLP/HTTP collector, without /v1/traces; left out: there are none.",
      ["http", "https"],
      "http://127.0.0.1:4318",
    ),
  ),
  sample: number("Share of requests traced; those that their caller traces always are.", {
    default: 0.01,
    min: 0,
    max: 1,
    unit: "share",
  }),
  maxBufferedSpans: integer("Spans that wait for the collector; more are dropped and counted.", {
    default: 10_000,
    min: 512,
    max: 1_000_000,
  }),
  exportTimeoutMs: integer("How long the collector may take for some spans, and for the last at the end.", {
    default: 3 * second,
    min: 100,
    max: minute,
    unit: "ms",
  }),
  logLevel: choice("JSON lines on stderr.", ["debug", "info", "warn", "error", "silent"], "info"),
});
