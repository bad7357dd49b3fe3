/**
 * The log: one JSON line per thing an operator should know. Never inputs, outputs or credentials.
 *
 * `debug` adds what is normal: every batch, every retry.
 */
import type { Clock } from "../clock.ts";
import type { Events } from "./events.ts";

export type LogLevel = "debug" | "info" | "warn" | "error" | "silent";

const LEVELS: readonly LogLevel[] = ["debug", "info", "warn", "error", "silent"];

export function logEvents(
  events: Events,
  clock: Clock,
  level: LogLevel,
  write: (line: string) => void,
): void {
  const log = (at: LogLevel, msg: string, fields: object): void => {
    if (LEVELS.indexOf(at) < LEVELS.indexOf(level)) return;
    write(`${JSON.stringify({ level: at, time: new Date(clock.now()).toISOString(), msg, ...fields })}\n`);
  };
  if (level === "silent") return;
  events.on("notice", ({ level: at, message }) => log(at, message, {}));
  events.on("worker.changed", ({ state, ...rest }) =>
    log(state === "down" ? "warn" : "info", "worker changed", { state, ...rest }),
  );
  events.on("worker.printed", (fields) => log("info", "worker printed", fields));
  events.on("task.dead", (fields) => log("warn", "dead letter", fields));
  events.on("task.lost", (fields) => log("error", "task lost", fields));
  if (level !== "debug") return;
  events.on("batch.started", ({ model, batch }) => log("debug", "batch started", { model, ...batch }));
  events.on("batch.settled", (fields) => log("debug", "batch settled", fields));
  events.on("batch.overdue", (fields) => log("debug", "batch overdue", fields));
  events.on("task.retried", (fields) => log("debug", "task retried", fields));
  events.on("request.answered", ({ id, model, tier, status, code, latencyMs }) =>
    log("debug", "request answered", { id, model, tier, status, code, latencyMs }),
  );
}
