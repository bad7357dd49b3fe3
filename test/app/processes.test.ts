/** The parent of `ferry serve --processes`, around processes made of plain functions. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type AddressInfo } from "node:net";
import { describe, test } from "node:test";
import type { ServeTotals } from "../../src/cli/terminal/banner.ts";
import type { Part } from "../../src/app/processes/core-link.ts";
import { choosePorts } from "../../src/app/processes/ports.ts";
import { explainStart } from "../../src/app/port-holder.ts";
import { FIRST_WAIT_MS, MAX_WAIT_MS, TALLY_MS } from "../../src/app/processes/processes.ts";
import { configOf, ready, stage, started } from "./process-stage.ts";

function tallyOf(requests: number): ServeTotals {
  return { requests, batches: 1, tasks: requests, calls: 1, lost: 0, queued: 2, running: 1 };
}

describe("the parent", () => {
  test("starts the core, then the gateways, and is ready when all are", async () => {
    const { processes, forked } = stage(3);
    let up = false;
    const start = processes.start().then(() => (up = true));
    assert.equal(forked.length, 1);
    forked[0]!.watcher.word(ready(8081));
    assert.equal(forked.length, 3);
    forked[2]!.watcher.word(ready(8081));
    await new Promise(setImmediate);
    assert.equal(up, false);
    forked[1]!.watcher.word(ready(8081));
    await start;
    const begun = forked.map(({ orders }) => orders.map((order) => order.is === "begin" && order.part));
    const { vaultKey } = begun[0]![0] as Part;
    assert.equal(Buffer.from(vaultKey, "base64").length, 32);
    const part = { gateways: 2, socket: "/run/core", vaultKey };
    assert.deepEqual(begun, [
      [{ kind: "core", number: 0, ...part }],
      [{ kind: "gateway", number: 1, ...part }],
      [{ kind: "gateway", number: 2, ...part }],
    ]);
    assert.equal(processes.adminUrl, "http://127.0.0.1:8081");
    assert.equal(processes.apiUrl, "http://127.0.0.1:8080");
  });

  test("gives up when one never becomes ready: its reason, once, and nobody is left", async () => {
    const { processes, forked, lines } = stage(3);
    const start = processes.start();
    forked[0]!.watcher.word(ready(8081));
    forked[1]!.watcher.word({ is: "failed", why: "redis is not reachable" });
    forked[2]!.watcher.word({ is: "failed", why: "redis is not reachable" });
    forked[1]!.watcher.gone("ended with exit code 1");
    forked[2]!.watcher.gone("ended with exit code 1");
    await assert.rejects(start, { message: "redis is not reachable" });
    assert.deepEqual(
      forked.map(({ killed }) => killed),
      [true, false, false],
    );
    assert.deepEqual(lines, []);
  });

  test("says how a process ended that said nothing", async () => {
    const { processes, forked } = stage(1);
    const start = processes.start();
    forked[0]!.watcher.gone("was killed by SIGSEGV");
    await assert.rejects(start, { message: "process core was killed by SIGSEGV before all were ready" });
  });

  test("starts a dead process again, later each time, and anew once it has served for a while", async () => {
    const { forked, clock, logged } = await started(2);
    let waitMs = FIRST_WAIT_MS;
    for (let life = 2; life < 14; life++) {
      forked.at(life === 2 ? 1 : -1)!.watcher.gone("was killed by SIGKILL");
      assert.deepEqual(
        { ...logged().at(-1), time: "" },
        {
          level: "warn",
          time: "",
          msg: "process ended",
          process: "gateway-1",
          pid: 100 + life,
          why: "was killed by SIGKILL",
          restartMs: waitMs,
        },
      );
      await clock.run(clock.now() + waitMs - 1);
      assert.equal(forked.length, life);
      await clock.run(clock.now() + 2);
      assert.equal(forked.length, life + 1);
      waitMs = Math.min(MAX_WAIT_MS, 2 * waitMs);
    }
    assert.equal(waitMs, MAX_WAIT_MS);
    forked.at(-1)!.watcher.word(ready(8082));
    assert.equal(logged().at(-1).msg, "process ready");
    await clock.run(clock.now() + MAX_WAIT_MS);
    forked.at(-1)!.watcher.gone("ended with exit code 0");
    assert.equal(logged().at(-1).restartMs, FIRST_WAIT_MS);
  });

  test("a restart that fails tells why and is tried again", async () => {
    const { forked, clock, logged } = await started(1);
    forked[0]!.watcher.gone("was killed by SIGKILL");
    assert.equal(logged().at(-1).restartMs, 0, "the core at once");
    await clock.run(clock.now() + 1);
    forked[1]!.watcher.word({ is: "failed", why: "admin.listen 127.0.0.1:8081: already in use" });
    forked[1]!.watcher.gone("ended with exit code 1");
    const { why, restartMs } = logged().at(-1);
    assert.deepEqual([why, restartMs], ["admin.listen 127.0.0.1:8081: already in use", FIRST_WAIT_MS]);
  });

  test("lines carry the name of their process; what is no line of the log passes as it is", async () => {
    const { forked, lines } = await started(2);
    forked[0]!.watcher.line('{"level":"warn","msg":"a"}');
    forked[1]!.watcher.line("    at Object.<anonymous> (file.ts:1:1)");
    assert.deepEqual(lines, [
      '{"level":"warn","msg":"a","process":"core"}\n',
      "    at Object.<anonymous> (file.ts:1:1)\n",
    ]);
  });

  test("what several say alike during the start is said once; afterwards everything is", async () => {
    const { forked, processes, lines } = stage(2);
    const start = processes.start();
    const warn = (at: number, second: number, msg = "maxmemory is 0") =>
      forked[at]!.watcher.line(`{"level":"warn","time":"2026-01-05T10:00:0${second}.000Z","msg":"${msg}"}`);
    warn(0, 1);
    forked[0]!.watcher.word(ready(8081));
    warn(1, 2);
    warn(1, 2, "another");
    forked[1]!.watcher.word(ready(8081));
    await start;
    warn(0, 3);
    warn(1, 3);
    const said = lines.map((line) => JSON.parse(line) as { msg: string; process: string });
    assert.deepEqual(
      said.map(({ msg, process }) => `${msg} ${process}`),
      ["maxmemory is 0 core", "another gateway-1", "maxmemory is 0 core", "maxmemory is 0 gateway-1"],
    );
  });

  test("logLevel silent also silences what the parent says of them", async () => {
    const { forked, lines } = await started(1, "telemetry: { logLevel: silent }");
    forked[0]!.watcher.gone("was killed by SIGKILL");
    assert.deepEqual(lines, []);
  });

  test("a tally is that of all, and does not wait for one that hangs", async () => {
    const { processes, forked, clock } = await started(3);
    const asked = processes.tally();
    forked[0]!.watcher.word({ is: "tally", tally: tallyOf(5) });
    forked[1]!.watcher.word({ is: "tally", tally: tallyOf(7) });
    await clock.run(clock.now() + TALLY_MS + 1);
    const { requests, queued, running } = await asked;
    assert.deepEqual([requests, queued, running], [12, 4, 2]);
  });

  test("a drain asks all, starts nobody again, and ends with the sum of what they did", async () => {
    const { processes, forked, clock, lines } = await started(2);
    forked[0]!.watcher.gone("was killed by SIGKILL");
    await clock.run(clock.now() + FIRST_WAIT_MS + 1);
    forked[2]!.watcher.word(ready(8081));
    forked[1]!.watcher.gone("was killed by SIGKILL");
    const drained = processes.drain();
    assert.equal(forked[2]!.orders.at(-1)!.is, "drain");
    forked[2]!.watcher.word({ is: "ended", tally: tallyOf(9) });
    assert.equal((await processes.tally()).requests, 9, "while it is on its way out");
    forked[2]!.watcher.gone("ended with exit code 0");
    await drained;
    assert.equal((await processes.tally()).requests, 9);
    await processes.stop();
    assert.equal(await clock.run(clock.now() + 2 * MAX_WAIT_MS), 0);
    assert.equal(forked.length, 3);
    assert.doesNotMatch(lines.at(-1)!, /exit code 0/);
  });

  test("stop ends whoever is left at once", async () => {
    const { processes, forked } = await started(2);
    await processes.stop();
    assert.ok(forked.every(({ killed }) => killed));
  });
});

describe("ports", () => {
  test("those left open are chosen, so that a process that is started again finds them", async () => {
    const open = "listen: 127.0.0.1:0\nadmin: { listen: 127.0.0.1:0 }\ngrpc: { listen: 127.0.0.1:0 }";
    const { listen, admin, grpc } = await choosePorts(configOf(open));
    const ports = [listen.port, admin.listen.port, grpc.listen!.port];
    assert.equal(new Set(ports).size, 3);
    assert.ok(ports.every((port) => port > 0));
  });

  test("one that is taken is told", async () => {
    const server = createServer().listen(0, "127.0.0.1");
    await once(server, "listening");
    const { port } = server.address() as AddressInfo;
    const config = configOf(`listen: 127.0.0.1:0\nadmin: { listen: "127.0.0.1:${port}" }`);
    try {
      await assert.rejects(choosePorts(config), (error) => {
        assert.match(
          explainStart(error, config),
          new RegExp(`^admin.listen 127\\.0\\.0\\.1:${port}: already in use`),
        );
        return true;
      });
    } finally {
      server.close();
    }
  });
});
