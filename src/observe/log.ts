/**
 * The log: one pino line per thing an operator should know. Never inputs, outputs or credentials.
 *
 *   {"level":"warn","time":"2026-01-05T10:00:00.180Z","msg":"dead letter","task_id":"…","model":"embed",…}
 *
 * `debug` adds every batch, retry and request. Lines carry `task_id`, `batch_id` and `trace_id` where known. Each line
 * is passed to `write` whole and at once, so nothing is lost when the process dies. `pretty.ts` formats lines for
 * people.
 */
import { pino } from "pino";
import type { Clock } from "../app/clock.ts";
import { batchSpan, readTraceparent } from "../core/trace.ts";
import { type Events, listening } from "./events.ts";

export type LogLevel = "debug" | "info" | "warn" | "error" | "silent";

export function logEvents(
  bus: Events,
  clock: Clock,
  level: LogLevel,
  write: (line: string) => void,
): () => void {
  const { events, end } = listening(bus);
  if (level === "silent") return end;
  const options = {
    level,
    base: null,
    timestamp: () => `,"time":"${new Date(clock.now()).toISOString()}"`,
    formatters: { level: (word: string) => ({ level: word }) },
  };
  const log = pino(options, { write });
  // `msg` before the facts, where people look first; pino would put it last.
  events.on("notice", ({ level: at, message, logged }) => {
    if (logged !== true) log[at]({ msg: message });
  });
  events.on("worker.changed", ({ state, ...rest }) =>
    log[state === "down" ? "warn" : "info"]({ msg: "worker changed", state, ...rest }),
  );
  events.on("scaling.changed", (fields) =>
    log.info({ msg: "another number of workers is wanted", ...fields }),
  );
  events.on("worker.printed", (fields) => log.info({ msg: "worker printed", ...fields }));
  events.on("task.dead", ({ id, trace, ...rest }) =>
    log.warn({ msg: "dead letter", task_id: id, ...rest, ...traceOf(trace) }),
  );
  events.on("task.lost", ({ id, ...rest }) => log.error({ msg: "task lost", task_id: id, ...rest }));
  if (level !== "debug") return end;
  events.on("batch.started", ({ model, batch, tasks }) => {
    const { id, ...rest } = batch;
    const traced = tasks.some(({ task }) => task.trace !== undefined);
    const trace = traced ? { trace_id: batchSpan(id).traceId } : {};
    log.debug({ msg: "batch started", model, batch_id: id, ...rest, ...trace });
  });
  events.on("batch.settled", ({ model, batchId, ...rest }) =>
    log.debug({ msg: "batch settled", model, batch_id: batchId, ...rest }),
  );
  events.on("batch.overdue", ({ model, batchId, ...rest }) =>
    log.debug({ msg: "batch overdue", model, batch_id: batchId, ...rest }),
  );
  events.on("task.retried", ({ id, batchId, trace, ...rest }) =>
    log.debug({ msg: "task retried", task_id: id, batch_id: batchId, ...rest, ...traceOf(trace) }),
  );
  events.on("request.answered", ({ id, model, tier, status, code, latencyMs, ending, trace }) => {
    const batch = ending?.batch && { batch_id: ending.batch.id };
    const traced = trace && { trace_id: trace.traceId };
    log.debug({
      msg: "request answered",
      task_id: id,
      model,
      tier,
      status,
      code,
      latencyMs,
      ...batch,
      ...traced,
    });
  });
  return end;
}

function traceOf(trace: string | undefined): { trace_id?: string } {
  const place = trace === undefined ? undefined : readTraceparent(trace);
  return place === undefined ? {} : { trace_id: place.traceId };
}
