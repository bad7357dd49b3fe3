/**
 * The reporter of a test process that `test/run.ts` started: one JSON object a line, to the file that
 * `--test-reporter-destination` names, and at the exit the CPU time of the process with that of the children it reaped.
 *
 * Loaded by Node itself in the test process, so it imports nothing but Node.
 */
import { AssertionError } from "node:assert";
import { appendFileSync, readFileSync } from "node:fs";
import { inspect } from "node:util";
import type { TestEvent } from "node:test/reporters";

export interface TestLine {
  readonly kind: "pass" | "fail" | "skip";
  /** From the outermost suite to the test. */
  readonly name: string;
  readonly ms: number;
  readonly at: string;
  readonly error?: string;
}

export interface CpuLine {
  readonly kind: "cpu";
  readonly seconds: number;
}

const CPU_FILE = "FERRY_TEST_CPU_FILE";
/** `sysconf(_SC_CLK_TCK)` on every Linux that Node runs on. */
const TICKS_A_SECOND = 100;

const cpuFile = process.env[CPU_FILE];
if (cpuFile !== undefined) {
  // Only for this process: processes that tests start would write theirs over it.
  delete process.env[CPU_FILE];
  process.on("exit", () => {
    const line: CpuLine = { kind: "cpu", seconds: cpuSeconds() };
    appendFileSync(cpuFile, `${JSON.stringify(line)}\n`);
  });
}

/** Of this process and of its children that have ended. */
export function cpuSeconds(): number {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6 + childrenSeconds();
}

function childrenSeconds(): number {
  try {
    // Fields 16 and 17 of proc_pid_stat(5), counted from 1; the name in field 2 may hold blanks.
    const fields = readFileSync("/proc/self/stat", "utf8").split(") ")[1]!.split(" ");
    return (Number(fields[13]) + Number(fields[14])) / TICKS_A_SECOND;
  } catch {
    return 0;
  }
}

export default async function* report(events: AsyncIterable<TestEvent>): AsyncGenerator<string> {
  const names: string[] = [];
  for await (const event of events) {
    if (event.type === "test:start") names[event.data.nesting] = event.data.name;
    if (event.type !== "test:pass" && event.type !== "test:fail") continue;
    const { nesting, name, details, file, line } = event.data;
    const error = event.type === "test:fail" ? event.data.details.error : undefined;
    // A suite fails with its tests, which have their own lines.
    if (error !== undefined && Reflect.get(error, "failureType") === "subtestsFailed") continue;
    if (error === undefined && details.type === "suite") continue;
    const skipped = event.data.skip !== undefined && event.data.skip !== false;
    const written: TestLine = {
      kind: error !== undefined ? "fail" : skipped ? "skip" : "pass",
      name: [...names.slice(0, nesting), name].join(" › "),
      ms: details.duration_ms,
      at: file === undefined ? "" : `${file}:${line}`,
      ...(error !== undefined && { error: describe(error.cause ?? error) }),
    };
    yield `${JSON.stringify(written)}\n`;
  }
}

/** With the stack as far as it is ours; an assertion's message already holds what its fields repeat. */
function describe(error: unknown): string {
  const text = error instanceof AssertionError ? (error.stack ?? error.message) : inspect(error);
  return text
    .split("\n")
    .filter((line) => !/^\s+at .*\(?node:(?:internal|async_hooks)/.test(line))
    .join("\n");
}
