/**
 * Does the simulation find mistakes? Makes one at a time in a copy of the tree, and counts the seeds until it is found.
 *
 *   node test/sim/mutants.ts [--seeds 2000] [--only NAME]
 *
 * Exit code 1 when one gets through, or when the line that it changes is no longer there.
 */
import { spawnSync } from "node:child_process";
import { cpSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { parseArgs } from "node:util";

interface Mutant {
  readonly name: string;
  readonly file: string;
  readonly from: string;
  readonly to: string;
  /** Found by this test instead, or before the seeds. */
  readonly test?: string;
}

const MUTANTS: readonly Mutant[] = [
  {
    name: "bad news is taken from any lease (no fencing token)",
    file: "src/engine/memory/engine.ts",
    from: 'if (record.state !== "running" || record.lease !== lease.token) return "late";',
    to: 'if (record.state !== "running") return "late";',
  },
  {
    name: "a task that has ended is settled again",
    file: "src/engine/memory/engine.ts",
    from: `if (record.final) return "late";`,
    to: "",
  },
  {
    name: "tasks of a lease that ran out are not put back",
    file: "src/engine/memory/engine.ts",
    from: "return this.#retry(record, record.lost < ALONE_FROM_LOST ? retry : { ...retry, maxBatchSize: 1 }, now);",
    to: "return this.#places.retire(record); void [retry, ALONE_FROM_LOST];",
  },
  {
    name: "a retry that is due is forgotten",
    file: "src/engine/memory/engine.ts",
    from: "this.#places.sitOut(record, verdict.at);",
    to: "this.#places.leave(record); this.#places.retire(record);",
  },
  {
    name: "accepted before it is on disk",
    file: "src/engine/memory/engine.ts",
    from: "await keeper.journal.flushed();\n      return reply;",
    to: "return reply;",
  },
  {
    name: "an Idempotency-Key is not bound to the task that it joined",
    file: "src/engine/memory/engine.ts",
    from: "this.#records.bindKey(leader, sharing);",
    to: "",
  },
  {
    name: "the queue has no bound",
    file: "src/engine/memory/places.ts",
    from: "if (this.waiting >= maxQueued)",
    to: "if (this.waiting >= maxQueued + 3)",
  },
  {
    name: "outputs are matched by position whatever their number",
    file: "src/workers/backend/replies.ts",
    from: "if (texts.length === tasks.length) return",
    to: "if (texts.length > 0) return",
  },
  {
    name: "a batch may be one task too large",
    file: "src/dispatch/dispatcher.ts",
    from: "Math.min(size, smallerBatch(most)) : size;",
    to: "Math.min(size, smallerBatch(most)) : size + 1;",
  },
  {
    name: "a process that woke up late starts its batch all the same",
    file: "src/dispatch/dispatcher.ts",
    from: "if (!slot.held(now)) return",
    to: "if (Math.abs(0) > 1) return",
  },
  {
    name: "a batch may be heavier than its budget",
    file: "src/dispatch/capacity.ts",
    from: "return this.#taken + weight <= this.most;",
    to: "return weight <= this.most;",
  },
  {
    name: "what did not fit into its batch is not given back",
    file: "src/dispatch/dispatcher.ts",
    from: "returned = this.#giveBack(batch, fitted.left);",
    to: "returned = undefined;",
  },
  {
    name: "a bisection goes on though the worker's lease has run out",
    file: "src/dispatch/batch-run.ts",
    from: "if (!this.#slot.held(clock.now())) {",
    to: "if (Math.abs(0) > 1) {",
  },
  {
    name: "a free worker is not noticed",
    file: "src/dispatch/dispatcher.ts",
    from: 'this.#freed = ran ? { slot, at: now } : undefined;\n    this.wake("freed");',
    to: "this.#freed = ran ? { slot, at: now } : undefined;",
  },
  {
    name: "a worker is handed a third batch",
    file: "src/dispatch/pipeline.ts",
    from: "batch === undefined || slot.ahead !== undefined || batch.exclusive",
    to: "batch === undefined || batch.exclusive",
  },
  {
    name: "tasks that differ in their parameters share one content",
    file: "src/gateway/request-path.ts",
    from: "${model.name} ${parametersKey}`",
    to: "${model.name}`",
  },
  {
    name: "no gateway looks up what a lost message would have said",
    file: "src/engine/redis/outcomes.ts",
    from: "await this.#lookUp(old);",
    to: "",
  },
  {
    name: "a failure is taken from a batcher that has lost the task",
    file: "src/engine/redis/lua/settle.lua",
    from: "elseif me ~= '' and (own or owner or me) ~= me then reply[#reply + 1] = -2",
    to: "",
  },
  {
    name: "a later outcome replaces the first",
    file: "src/engine/redis/settlements.ts",
    from: '["HSETNX", bundle, field, outcome]',
    to: '["HSET", bundle, field, outcome]',
  },
  {
    name: "what is settled of a bundle runs again when it is taken over",
    file: "src/engine/redis/pool.ts",
    from: "if (final !== null) {\n          entry.left--;\n          return;\n        }",
    to: "void final;",
  },
  {
    name: "what a dead batcher held is not taken over",
    file: "src/engine/redis/reader.ts",
    from: "else if (served.has(places[at]!.model))",
    to: "else if (Math.abs(0) > 1)",
  },
  {
    name: "an entry is acknowledged when one of its tasks has ended",
    file: "src/engine/redis/pool.ts",
    from: "if (entry.left > 0 || entry.unconfirmed > 0 || entry.lost) return false;",
    to: "if (entry.unconfirmed > 0 || entry.lost) return false;",
  },
  {
    name: "an entry is acknowledged before its outcomes are written",
    file: "src/engine/redis/pool.ts",
    from: "if (entry.left > 0 || entry.unconfirmed > 0 || entry.lost) return false;",
    to: "if (entry.left > 0 || entry.lost) return false;",
  },
  {
    name: "an entry that another batcher holds is acknowledged",
    file: "src/engine/redis/pool.ts",
    from: "if (entry.left > 0 || entry.unconfirmed > 0 || entry.lost) return false;",
    to: "if (entry.left > 0 || entry.unconfirmed > 0) return false;",
  },
  {
    name: "entries whose delivery was lost are not looked for",
    file: "src/engine/redis/reader.ts",
    from: "if (other === name) await this.#recover(shard, streams[at]!);",
    to: "if (other === name) continue;",
  },
  {
    name: "an outcome is told before it is certain",
    file: "src/engine/redis/settlements.ts",
    from: "entry.gateway !== name && !this.#pool.contested(entry)",
    to: "name !== entry.id",
  },
  {
    name: "a lease of a worker is counted from the reply of the beat, not from when it was sent",
    file: "src/workers/fleet/membership.ts",
    from: "const heldUntil = sentAt + this.#options.aliveMs * (1 - MARGIN);",
    to: "const heldUntil = now + this.#options.aliveMs * (1 + 4 * MARGIN);",
  },
  {
    name: "a gateway does not send again what its core has not answered",
    file: "src/engine/remote/engine.ts",
    from: "this.#unanswered.each((number, request) => this.#send(channel, number, request));",
    to: "",
  },
  {
    name: "a gateway does not ask a new connection for what it awaits",
    file: "src/engine/remote/engine.ts",
    from: "if (accepted) channel.message(wire.AWAIT).text(task.id).double(until).end();",
    to: "void [task, until, accepted];",
  },
  {
    name: "an answer of the core goes to another request",
    file: "src/engine/remote/engine.ts",
    from: "const number = this.#first + ((low - this.#first) >>> 0);",
    to: "const number = this.#first + ((low - this.#first) >>> 1);",
  },
  {
    name: "a gateway holds requests for as long as its core is away",
    file: "src/engine/remote/engine.ts",
    from: "this.#holdAlarm = clock.at(this.#lostAt + HOLD_MS, () => this.#refuseAll(AWAY));",
    to: "",
  },
  {
    name: "the core goes on waiting for a task that was not accepted",
    file: "src/engine/remote/server.ts",
    from: "if (fresh && !own) this.#on.unwait(id);",
    to: "void [fresh, own];",
  },
  {
    name: "the core waits for a task that it has lost",
    file: "src/engine/remote/server.ts",
    from: "if (record === undefined) this.#channel.message(wire.LOST).text(id).end();\n    else this.settled(record);",
    to: "if (record !== undefined) this.settled(record);",
  },
  {
    name: "the beginning of a message that was cut is forgotten",
    file: "src/engine/remote/channel.ts",
    from: "this.#partBytes = size;",
    to: "this.#partBytes = from === 0 ? size : to - from;",
  },
  {
    name: "a buffer is used again before it has left",
    file: "src/engine/remote/channel.ts",
    from: "this.#link.write(bytes, () => {\n        this.#leaving -= length;\n        this.out.left();\n      });",
    to: "this.#link.write(bytes, () => void (this.#leaving -= length));\n      this.out.left();",
  },
  {
    name: "a task may be overtaken for ever",
    file: "src/engine/memory/queues.ts",
    from: "record.overtakenUntil ||= now + overtakeMs / share;",
    to: "void share;",
    test: "test/sim/lengths.test.ts",
  },
  {
    name: "each time that a task is overtaken its time begins anew",
    file: "src/engine/memory/queues.ts",
    from: "record.overtakenUntil ||= now + overtakeMs / share;",
    to: "record.overtakenUntil = now + overtakeMs / share;",
    test: "test/sim/lengths.test.ts",
  },
  {
    name: "a task that none may overtake does not end what is examined",
    file: "src/engine/memory/queues.ts",
    from: "if (mustLeave >= 0) records.length = mustLeave + 1;",
    to: "",
    test: "test/sim/lengths.test.ts",
  },
  {
    name: "a tenant that was served keeps its place before the others",
    file: "src/engine/memory/queues.ts",
    from: "this.#leaveRing(row);\n      this.#enterRing(row);\n    }\n  }",
    to: "void row;\n    }\n  }",
    test: "test/sim/lengths.test.ts",
  },
  {
    name: "a tier's unused seats are not given back",
    file: "src/engine/memory/queues.ts",
    from: "refundSeats(max, depths, creditsBefore, credits, used);",
    to: "void refundSeats;",
    test: "test/engine/memory.test.ts",
  },
  {
    name: "lengths out of the range join a batch",
    file: "src/engine/memory/queues.ts",
    from: "length >= range.least && length <= range.most && maxBatchSize",
    to: "length >= range.least && maxBatchSize",
    test: "test/engine/memory.test.ts",
  },
];

const PATIENCE_MS = 180_000;
const root = join(import.meta.dirname, "..", "..");
const { values } = parseArgs({ options: { seeds: { type: "string" }, only: { type: "string" } } });
const seeds = values.seeds ?? "2000";

/** The first seed that finds it, or what went wrong instead. */
function hunt({ file, from, to, test }: Mutant): { found: boolean; said: string } {
  const copy = mkdtempSync(join(tmpdir(), "ferry-mutant-"));
  try {
    for (const part of ["src", "test", "package.json"]) {
      cpSync(join(root, part), join(copy, part), { recursive: true });
    }
    symlinkSync(join(root, "node_modules"), join(copy, "node_modules"));
    const text = readFileSync(join(copy, file), "utf8");
    if (text.split(from).length !== 2) return { found: false, said: `its line is not in ${file} once` };
    writeFileSync(join(copy, file), text.replace(from, to));
    const only = file.startsWith("src/engine/remote/") ? ["--only", "cores"] : [];
    const words =
      test === undefined
        ? ["test/sim/simulate.ts", "--seeds", seeds, "--threads", "1", "--json", ...only]
        : ["--test", test];
    const patience = { cwd: copy, encoding: "utf8", timeout: PATIENCE_MS } as const;
    const { stdout, stderr, error } = spawnSync(process.execPath, words, patience);
    if (test !== undefined) {
      const broken = /✖ ([^\n(]*)/.exec(stdout);
      return {
        found: broken !== null,
        said: broken === null ? `not found by ${test}` : `${test}: ${broken[1]}`,
      };
    }
    const failed = /seed (\d+): ([^\n]*)/.exec(stderr);
    if (failed !== null) return { found: true, said: `seed ${failed[1]}: ${failed[2]}` };
    // One that loops without end fills the memory of its thread.
    if (stderr.includes("ERR_WORKER_OUT_OF_MEMORY")) return { found: true, said: "out of memory" };
    if (error !== undefined) return { found: false, said: `stopped: ${error.message}` };
    return { found: false, said: stdout === "" ? stderr.slice(0, 400) : `not found in ${seeds} seeds` };
  } finally {
    rmSync(copy, { recursive: true });
  }
}

let missed = 0;
for (const mutant of MUTANTS) {
  if (values.only !== undefined && !mutant.name.includes(values.only)) continue;
  const { found, said } = hunt(mutant);
  if (!found) missed++;
  process.stdout.write(`${found ? "✔" : "✖"} ${mutant.name}\n    ${said}\n`);
}
process.stdout.write(missed === 0 ? "all found\n" : `${missed} got through\n`);
process.exitCode = missed === 0 ? 0 : 1;
