/** The part of the table that says how many workers a model should have, and who sees to it. */
import { url } from "./setting-addresses.ts";
import { boolean, group, integer, number, optional, path } from "./setting-kinds.ts";

const second = 1000;
const minute = 60 * second;
const hour = 60 * minute;
const day = 24 * hour;

const forMs = (fallback: number) =>
  integer("For how long.", { default: fallback, min: 0, max: day, unit: "ms" });
const add = (fallback: number) =>
  integer("How many more; 0 turns this rule off.", { default: fallback, min: 0, max: 1000 });
const depth = (fallback: number) =>
  integer("More tasks queued than this.", { default: fallback, min: 0, max: 10_000_000 });
const load = (doc: string, fallback: number) =>
  number(doc, { default: fallback, min: 0, max: 100, unit: "share" });

export const scaling = group("How many workers there should be (docs/operations.md).", {
  min: integer("Never fewer.", { default: 1, min: 0, max: 10_000 }),
  max: integer("Never more.", { default: 32, min: 1, max: 10_000 }),
  longLine: group("A long line.", { depth: depth(500), forMs: forMs(30 * second), add: add(3) }),
  line: group("A line that stays.", { depth: depth(100), forMs: forMs(minute), add: add(1) }),
  busy: group("Load that stays high.", {
    load: load("Arrivals over capacity above this.", 0.85),
    forMs: forMs(5 * minute),
    add: add(1),
  }),
  quiet: group("Load that stays low.", {
    load: load("Arrivals over capacity below this.", 0.4),
    forMs: forMs(15 * minute),
    remove: integer("How many fewer; 0: never.", { default: 1, min: 0, max: 1000 }),
  }),
  maxRemoveShare: number("The largest share of the workers that goes at a time; one may always go.", {
    default: 0.2,
    min: 0,
    max: 1,
    unit: "share",
  }),
  coolDownMs: integer("After any change, until workers are removed.", {
    default: 5 * minute,
    min: 0,
    max: day,
    unit: "ms",
  }),
  coldStartMs: integer("From asking for a worker to its first batch; learned where Ferry starts them.", {
    default: minute,
    min: 0,
    max: hour,
    unit: "ms",
  }),
  forecast: boolean(
    "Whether the trend of arrivals is looked at, so far ahead as a worker takes to start.",
    true,
  ),
  apply: boolean("Whether Ferry starts and ends workers itself: python, module and simulated ones.", false),
  webhook: optional(
    url(
      "Where the number is sent, as JSON, whenever it changes.",
      ["http", "https"],
      "http://scaler:9090/ferry",
    ),
  ),
  command: optional(
    path("What is run whenever the number changes, with FERRY_MODEL and FERRY_DESIRED in its environment.", {
      example: "./scale.sh",
      program: true,
    }),
  ),
  hookTimeoutMs: integer("How long the webhook or the command may take.", {
    default: 30 * second,
    min: 100,
    max: hour,
    unit: "ms",
  }),
});
