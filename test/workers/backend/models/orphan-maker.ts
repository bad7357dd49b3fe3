/** A Ferry that a test will kill: starts Python workers and runs one batch on the first. */
import { PythonBackend } from "../../../../src/workers/backend/python.ts";
import { SystemClock } from "../../../../src/app/clock.ts";
import { Events } from "../../../../src/observe/events.ts";

const [python, fn, port, mode] = process.argv.slice(2);
const backend = new PythonBackend(
  { function: fn!, workers: 1, python: python!, startTimeoutMs: 10_000, maxReplyBytes: 1_000_000 },
  { model: "m", clock: new SystemClock(), events: new Events() },
);
await backend.start();
const tasks = [
  { id: "port", input: port! },
  { id: "mode", input: JSON.stringify(mode) },
];
await backend.workers[0]!.run({ id: "batch", tasks, parameters: "" }, new AbortController().signal);
