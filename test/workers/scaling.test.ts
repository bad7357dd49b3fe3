/** The loop around the autoscaler: what it does to workers of its own, whom it tells, what it shows. */
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { once } from "node:events";
import type { AddressInfo } from "node:net";
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { describe, test } from "node:test";
import { SystemClock } from "../../src/app/clock.ts";
import type { Sighting } from "../../src/core/scaling.ts";
import { parseConfig } from "../../src/app/config/load.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { ScalingHooks } from "../../src/workers/scaling-hooks.ts";
import { ScalingLoop } from "../../src/workers/scaling.ts";
import { Events } from "../../src/observe/events.ts";
import { simulate } from "../dispatch/simulated.ts";
import { poolOf } from "./network-workers.ts";

/** +3 above 500 queued for 2.5 s, +1 above 100 for 5 s, −1 below 40 % load for 30 s. */
const SCALING = { apply: true, min: 1, max: 10, queueDepth: 100, coldStartMs: 5000, coolDownMs: 10_000 };

/** A model whose two workers take 3 s to start. */
function stage() {
  const model = { name: "m", backend: { kind: "simulated", workers: 2 }, scaling: SCALING };
  const { config } = parseConfig(JSON.stringify({ models: [model] }), "f.yaml", {});
  const simulation = simulate({ backend: { workers: 2 } });
  const { clock, events, backend, dispatcher } = simulation;
  const { pool, operator, change } = poolOf([simulation], config!.models);
  const state = { broken: false, depth: 0, arrivalsPerMs: 0.6 };
  const grow = backend.grow.bind(backend);
  backend.grow = async () => {
    await new Promise<void>((resolve) => clock.at(clock.now() + 3000, resolve));
    if (state.broken) throw new Error("no GPU left");
    return grow();
  };
  const changes: [from: number, desired: number][] = [];
  const notices: string[] = [];
  events.on("scaling.changed", ({ from, desired }) => changes.push([from, desired]));
  events.on("notice", ({ message }) => notices.push(message));
  const count = (): number => dispatcher.workers.slots.length;
  const see = (): Omit<Sighting, "at"> => ({
    healthy: count(),
    depth: state.depth,
    arrivalsPerMs: state.arrivalsPerMs,
    workerPerMs: 0.5,
  });
  const loop = new ScalingLoop({ clock, events, config: () => config!, pool, see, leads: () => true });
  const pass = (ms: number): Promise<unknown> => simulation.run(ms);
  return { simulation, pool, operator, change, loop, state, changes, notices, count, pass };
}

describe("workers of our own", () => {
  test("are started one after another when more are wanted, and ended when fewer are", async () => {
    const { state, changes, count, pass } = stage();
    state.depth = 600;
    await pass(4500);
    assert.deepEqual(changes, [[2, 5]]);
    state.depth = 0;
    for (const wanted of [3, 4, 5, 5]) {
      await pass(3000);
      assert.equal(count(), wanted);
    }
    state.arrivalsPerMs = 0.01;
    await pass(300_000);
    assert.equal(count(), 1);
    assert.deepEqual(changes.at(-1), [2, 1]);
  });

  test("one that cannot be started is told once, and tried again", async () => {
    const { state, loop, notices, count, pass } = stage();
    state.broken = true;
    state.depth = 200;
    await pass(40_000);
    assert.equal(count(), 2);
    assert.equal(loop.report()[0]!.trouble, "a worker could not be started: no GPU left");
    assert.deepEqual(notices, ["m: a worker could not be started: no GPU left; it is tried again"]);
    state.broken = false;
    await pass(40_000);
    assert(count() > 2);
    assert.equal(loop.report()[0]!.trouble, undefined);
  });

  test("nothing moves after a stop", async () => {
    const { loop, state, changes, count, pass } = stage();
    loop.stop();
    state.depth = 900;
    await pass(60_000);
    assert.deepEqual([changes, count()], [[], 2]);
  });

  test("one that an operator removes or drains is replaced", async () => {
    const { operator, pool, count, pass } = stage();
    await pass(1001);
    assert.equal((await operator.remove("gpu-1")).gone, true);
    await pass(5000);
    assert.deepEqual([count(), operator.removed()], [2, []]);
    operator.drain("gpu-2");
    await pass(5000);
    assert.deepEqual([count(), pool.of("m")!.live.filter(({ drained }) => !drained).length], [3, 2]);
  });

  test("one that was being started when its backend was replaced is ended, and gets no batch", async () => {
    const { pool, state, change, simulation, count, pass } = stage();
    [state.depth, state.arrivalsPerMs] = [600, 1.5];
    await pass(4500);
    state.depth = 0;
    const { model } = pool.of("m")!;
    const backend = { ...model.backend, baseMs: 7 } as typeof model.backend;
    await change({ ...model, backend });
    assert.equal(pool.of("m")!.growing, 1);
    await pass(20_000);
    assert.equal(count(), simulation.backend.workers.length);
    assert.equal(count(), 5);
  });
});

test("what is shown", async () => {
  const { loop, pass } = stage();
  await pass(5000);
  const [shown] = loop.report();
  assert.deepEqual(
    { ...shown, changed_at: "", expected_per_second: 600 },
    {
      model: "m",
      desired: 2,
      healthy: 2,
      load: 0.6,
      queue_depth: 0,
      expected_per_second: 600,
      reason: "as configured",
      changed_at: "",
      min: 1,
      max: 10,
      applied_by: "ferry",
    },
  );
  assert.equal(loop.desired("m"), 2);
  assert.equal(loop.desired("another"), undefined);
});

const scaling = { desired: 5, reason: "a long line", changedAt: 0 };

test("hooks: a webhook is told as JSON, again after a failure, the latest number only", async () => {
  const told: unknown[] = [];
  let fail = true;
  const server = createServer((request, response) => {
    let body = "";
    request.on("data", (chunk: Buffer) => (body += chunk.toString()));
    request.on("end", () => {
      response.writeHead(fail ? 500 : 200).end();
      told.push(JSON.parse(body));
      server.emit("told");
    });
  }).listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as AddressInfo;
  const clock = new VirtualClock();
  const events = new Events();
  const failed = new Promise((resolve) => events.on("notice", resolve));
  const options = { model: "m", webhook: `http://127.0.0.1:${port}/x`, timeoutMs: 5000, leads: () => true };
  const hooks = new ScalingHooks(options, clock, events);
  try {
    hooks.tell(scaling, 3);
    await failed;
    fail = false;
    const again = once(server, "told");
    hooks.tell({ ...scaling, desired: 6 }, 4);
    await again;
    assert.deepEqual(told, [
      { model: "m", desired: 5, healthy: 3, reason: "a long line" },
      { model: "m", desired: 6, healthy: 4, reason: "a long line" },
    ]);
  } finally {
    hooks.stop();
    server.closeAllConnections();
    server.close();
  }
});

test("hooks: a command gets the number in its environment, and no shell", async () => {
  const dir = mkdtempSync(join(tmpdir(), "ferry-hook-"));
  const out = join(dir, "told");
  const command = join(dir, "scale.sh");
  writeFileSync(
    command,
    `#!/bin/sh\nprintf '%s %s %s %s' "$FERRY_MODEL" "$FERRY_DESIRED" "$FERRY_HEALTHY" "$FERRY_REASON" > ${out}.new && mv ${out}.new ${out}\n`,
    { mode: 0o755 },
  );
  const options = { model: "m; touch x", command, timeoutMs: 20_000, leads: () => true };
  const hooks = new ScalingHooks(options, new SystemClock(), new Events());
  try {
    hooks.tell(scaling, 3);
    while (true) {
      try {
        assert.equal(readFileSync(out, "utf8"), "m; touch x 5 3 a long line");
        break;
      } catch (error) {
        if ((error as NodeJS.ErrnoException).code !== "ENOENT") throw error;
        await new Promise(setImmediate);
      }
    }
  } finally {
    hooks.stop();
    rmSync(dir, { recursive: true, force: true });
  }
});

/** Hooks with a command of these lines, and a clock that is moved by hand. */
class CommandStage {
  readonly dir = mkdtempSync(join(tmpdir(), "ferry-hook-"));
  readonly clock = new VirtualClock();
  readonly events = new Events();
  readonly notices: string[] = [];
  readonly hooks: ScalingHooks;
  leading = true;

  constructor(lines: string, timeoutMs = 20_000) {
    const command = join(this.dir, "scale.sh");
    const first = `cd ${this.dir}; [ -e good ]; bad=$?; echo called >> calls`;
    writeFileSync(command, `#!/bin/sh\n${first}\n${lines}\n`, { mode: 0o755 });
    this.events.on("notice", ({ message }) => this.notices.push(message));
    const options = { model: "m", command, timeoutMs, leads: () => this.leading };
    this.hooks = new ScalingHooks(options, this.clock, this.events);
  }

  read(name: string): string {
    return existsSync(join(this.dir, name)) ? readFileSync(join(this.dir, name), "utf8") : "";
  }

  get calls(): number {
    return this.read("calls").split("\n").length - 1;
  }

  async until(condition: () => boolean): Promise<void> {
    while (!condition()) await new Promise(setImmediate);
  }

  /** Moves the clock on until it is so. */
  async passUntil(condition: () => boolean): Promise<void> {
    while (!condition()) {
      await this.clock.run(this.clock.now() + 100);
      await new Promise(setImmediate);
    }
  }

  close(): void {
    this.hooks.stop();
    rmSync(this.dir, { recursive: true, force: true });
  }
}

test(
  "hooks: a command that fails is told once, in its own words, tried again, and told when it works",
  { timeout: 60_000 },
  async () => {
    const stage = new CommandStage(
      "echo starting >&2\n[ $bad = 0 ] || { echo 'quota of 4 GPUs' >&2; exit 3; }",
    );
    try {
      stage.hooks.tell(scaling, 3);
      await stage.until(() => stage.notices.length === 1);
      const why = "the command ended with 3: quota of 4 GPUs";
      const message = `m: nobody could be told how many workers there should be: ${why}; it is tried again`;
      assert.deepEqual([stage.notices, stage.hooks.trouble], [[message], why]);
      await stage.clock.run(stage.clock.now() + 1001);
      await stage.until(() => stage.calls === 2);
      writeFileSync(join(stage.dir, "good"), "");
      stage.hooks.tell({ ...scaling, desired: 6 }, 3);
      await stage.until(() => stage.notices.length > 1);
      // The same failure again was not told again.
      assert.deepEqual(stage.notices, [message, "m: who sees to the number of workers could be told again"]);
      assert.deepEqual([stage.calls, stage.hooks.trouble], [3, undefined]);
    } finally {
      stage.close();
    }
  },
);

test(
  "hooks: a command that is not there, or hangs: it ends with all that it started",
  { timeout: 60_000 },
  async () => {
    const missing = new ScalingHooks(
      { model: "m", command: "/no/such/program", timeoutMs: 1000, leads: () => true },
      new VirtualClock(),
      new Events(),
    );
    missing.tell(scaling, 3);
    while (missing.trouble === undefined) await new Promise(setImmediate);
    assert.equal(missing.trouble, "the command cannot be run (ENOENT)");
    missing.stop();
    const stage = new CommandStage("sleep 1000 & echo $! > pid.new && mv pid.new pid; wait", 2000);
    try {
      stage.hooks.tell(scaling, 3);
      await stage.until(() => stage.read("pid") !== "");
      await stage.passUntil(() => stage.hooks.trouble !== undefined);
      assert.equal(stage.hooks.trouble, "the command did not end within 2000 ms");
      const pid = Number(stage.read("pid"));
      await stage.until(() => !runs(pid));
    } finally {
      stage.close();
    }
  },
);

test("hooks: what a command leaves running on purpose does not hold it up", { timeout: 60_000 }, async () => {
  const stage = new CommandStage("sleep 1000 & echo $! > pid");
  let pid = 0;
  try {
    stage.hooks.tell(scaling, 3);
    await stage.until(() => stage.calls === 1);
    stage.hooks.tell({ ...scaling, desired: 6 }, 3);
    await stage.until(() => stage.calls === 2);
    pid = Number(stage.read("pid"));
    assert.deepEqual([stage.notices, runs(pid)], [[], true]);
  } finally {
    stage.close();
    if (pid > 0) process.kill(pid, "SIGKILL");
  }
});

test(
  "hooks: who does not lead tells nobody, until it does: then the number that it last came to",
  { timeout: 60_000 },
  async () => {
    const stage = new CommandStage('echo "$FERRY_DESIRED" >> told');
    try {
      stage.leading = false;
      stage.hooks.tell(scaling, 3);
      stage.hooks.tell({ ...scaling, desired: 7 }, 3);
      await stage.clock.run(stage.clock.now() + 60_000);
      assert.equal(stage.calls, 0);
      stage.leading = true;
      await stage.passUntil(() => stage.read("told") !== "");
      assert.equal(stage.read("told"), "7\n");
    } finally {
      stage.close();
    }
  },
);

/** Not a zombie either: nobody here waits for what a stopped program had started. */
function runs(pid: number): boolean {
  try {
    return !/\) Z /.test(readFileSync(`/proc/${pid}/stat`, "utf8"));
  } catch {
    return false;
  }
}
