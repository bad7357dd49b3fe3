/**
 * `ferry serve --processes` when its processes are killed and stopped: what was accepted is finished, who waits is
 * answered or told to come again, and nobody gets another's answer.
 */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { Load } from "./fleet-load.ts";
import { patient } from "./fleet.ts";
import { counter, engineConfig, KINDS, Several } from "./gateways.ts";
import { type Answer, assertError, eventually, Folder, SOON_MS } from "./harness.ts";
import { Gate, hang, stubModel, StubWorker } from "./stub-worker.ts";

const LATE = 10;

function slowly(stub: StubWorker): void {
  stub.behave = (call) => void setTimeout(() => call.echo(), LATE);
}

for (const kind of KINDS) {
  describe(`under load, ${kind}`, () => {
    const stack = new AsyncDisposableStack();
    let stub: StubWorker;
    let ferry: Several;

    before(async () => {
      const folder = stack.use(await Folder.make());
      stub = stack.use(await StubWorker.listen());
      const model = stubModel([stub], { timeouts: patient, maxBatchSize: 16 });
      const more = { admission: { mode: "off" }, telemetry: { logLevel: "info" } };
      ferry = stack.use(await Several.start(await engineConfig(kind, stack, folder, [model], more), 2));
    });
    after(() => stack.disposeAsync());

    test("a gateway is killed: only its own connections break, it comes back, counters never decrease", async () => {
      slowly(stub);
      const { part } = ferry;
      const [a, b] = ferry.doors();
      await using load = new Load(() => [part], { model: "stub" });
      await load.more(50);
      const gate = new Gate();
      stub.behave = gate.hold;
      const inputs = [0, 1, 2, 3];
      const broken = inputs.map((n) => assert.rejects(a!.post({ input: `breaks ${n}` })));
      const kept = inputs.map((n) => b!.post({ input: `stays ${n}` }));
      const total = (): Promise<number> => counter(part, "ferry_requests_total");
      await eventually(async () => (await part.health()).queue_depth > 8);
      const before = await total();
      await ferry.restart("gateway-1");
      await Promise.all(broken);
      assert.ok((await total()) >= before);
      slowly(stub);
      gate.open();
      for (const [n, { status, text, json }] of (await Promise.all(kept)).entries()) {
        assert.equal(status, 200, text);
        assert.deepEqual(json.output, { of: `stays ${n}` });
      }
      await load.more(100);
      const again = ferry.doors()[0]!;
      assert.equal((await again.post({ input: "at the new one" })).status, 200);
      (await load.stop()).assertWhole();
      assert.equal(await counter(part, "ferry_lost_total"), 0);
      const torn = part.lines.filter(({ level }) => level === undefined);
      assert.deepEqual(torn, []);
    });

    test("the core is killed: accepted tasks are finished, callers are answered or told to come again", async () => {
      slowly(stub);
      const { part } = ferry;
      const [a, b] = ferry.doors();
      await using load = new Load(() => [part], { model: "stub", name: "core" });
      await load.more(50);
      stub.behave = hang;
      const accepted = await Promise.all(
        Array.from({ length: 20 }, (_, n) => (n % 2 === 0 ? a! : b!).accept({ input: `accepted ${n}` })),
      );
      const waiting = Array.from({ length: 20 }, (_, n) =>
        (n % 2 === 0 ? a! : b!).post({ input: `held ${n}` }),
      );
      const polled = accepted.map((id) => b!.get(`/v1/result/${id}?wait=30`));
      await eventually(async () => (await part.health()).queue_depth >= 30);
      slowly(stub);
      const { core } = ferry;
      // A connection that is free when the parent, which would start the core again, stands still.
      assert.equal((await b!.get("/readyz")).status, 200);
      process.kill(part.pid, "SIGSTOP");
      process.kill(core, "SIGKILL");
      if (kind === "memory") await eventually(async () => (await b!.get("/readyz")).status === 503);
      process.kill(part.pid, "SIGCONT");
      const refused: { readonly answer: Answer; readonly ms: number }[] = [];
      for (let n = 0; ferry.core === core; n++) {
        const from = performance.now();
        const answer = await a!.post({ input: `new ${n}` });
        refused.push({ answer, ms: performance.now() - from });
        await pause(20);
      }
      for (const { answer, ms } of refused) {
        if (answer.status === 200) continue;
        assertError(answer, 503, "SERVICE_OVERLOADED");
        assert.ok(Number(answer.header("retry-after")) >= 1, answer.text);
        assert.ok(ms < 10_000, `${ms} ms`);
      }
      for (const [n, answer] of (await Promise.all(waiting)).entries()) {
        if (answer.status === 503) assert.ok(Number(answer.header("retry-after")) >= 1, answer.text);
        else assert.deepEqual([answer.status, answer.json.output], [200, { of: `held ${n}` }], answer.text);
      }
      for (const answer of await Promise.all(polled))
        assert.ok([200, 503].includes(answer.status), answer.text);
      for (const [n, id] of accepted.entries()) {
        const { status, output } = await (n % 3 === 0 ? a! : b!).result(id);
        assert.deepEqual([status, output], ["SUCCESS", { of: `accepted ${n}` }]);
      }
      await eventually(async () => (await a!.get("/readyz")).status === 200);
      await load.more(50);
      (await load.stop()).assertWhole();
      assert.equal(await counter(part, "ferry_lost_total"), 0);
    });

    // On Redis gateways go on without it.
    if (kind === "memory")
      test("the core stands still for 3 s: everybody is answered, none with another's output", async () => {
        slowly(stub);
        const [a, b] = ferry.doors();
        const { core } = ferry;
        process.kill(core, "SIGSTOP");
        const from = performance.now();
        const posts = Array.from({ length: 10 }, (_, n) =>
          (n % 2 === 0 ? a! : b!).post({ input: `still ${n}` }),
        );
        await pause(3000);
        process.kill(core, "SIGCONT");
        for (const [n, answer] of (await Promise.all(posts)).entries()) {
          if (answer.status !== 503)
            assert.deepEqual([answer.status, answer.json.output], [200, { of: `still ${n}` }], answer.text);
        }
        assert.ok(performance.now() - from < 30_000);
        for (const door of [a!, b!])
          await eventually(async () => (await door.post({ input: `awake ${door.pid}` })).status === 200);
      });

    test("a gateway stands still: the others answer, new connections too, and it goes on when it wakes up", async () => {
      slowly(stub);
      const [a, b] = ferry.doors();
      await a!.get("/healthz");
      process.kill(a!.pid, "SIGSTOP");
      const held = a!.post({ input: "for the one that stands still" });
      const fresh = Array.from({ length: 12 }, async (_, n) => {
        const late = AbortSignal.timeout(SOON_MS);
        const answer = await fetch(`${ferry.part.url}/v1/inference`, {
          method: "POST",
          headers: { "content-type": "application/json", connection: "close" },
          body: JSON.stringify({ input: `fresh ${n}` }),
          signal: late,
        });
        return answer.status;
      });
      assert.equal((await b!.post({ input: "at the other" })).status, 200);
      // One at most was on its way to the one that stands still.
      await eventually(async () => {
        const ended = await Promise.all(fresh.map((each) => Promise.race([each, pause(1, 0)])));
        return ended.filter((status) => status === 200).length >= 11;
      });
      process.kill(a!.pid, "SIGCONT");
      assert.equal((await held).status, 200);
      assert.deepEqual(new Set(await Promise.all(fresh)), new Set([200]));
    });

    test("SIGTERM to one gateway drains it, and to the core alone loses nothing", async () => {
      slowly(stub);
      const { part } = ferry;
      await using load = new Load(() => [part], { model: "stub", name: "term" });
      await load.more(50);
      await ferry.restart("gateway-2", "SIGTERM");
      await load.more(50);
      await ferry.restart("core", "SIGTERM");
      await load.more(50);
      (await load.stop()).assertWhole();
      assert.equal(await counter(part, "ferry_lost_total"), 0);
    });
  });
}

test("without a data folder: who waits is told to send it again, what was accepted is gone, new ones are served", async () => {
  await using stub = await StubWorker.listen(hang);
  const model = stubModel([stub], { timeouts: patient });
  await using ferry = await Several.start({ models: [model], admission: { mode: "off" } });
  const [a, b] = ferry.doors();
  const id = await a!.accept({ input: "accepted" });
  const held = [a!, b!].map((door) => door.post({ input: `held ${door.pid}` }));
  await eventually(async () => (await ferry.part.health()).queue_depth >= 2);
  const { core } = ferry;
  process.kill(core, "SIGSTOP");
  process.kill(core, "SIGKILL");
  stub.behave = (call) => call.echo();
  for (const answer of await Promise.all(held)) {
    const { message } = assertError(answer, 503, "SERVICE_OVERLOADED");
    assert.match(message!, /send/);
    assert.ok(Number(answer.header("retry-after")) >= 1);
  }
  await eventually(() => ferry.core !== core);
  for (const door of ferry.doors()) {
    await eventually(async () => (await door.get(`/v1/result/${id}`)).status === 404);
    assert.equal((await door.post({ input: `again ${door.pid}` })).status, 200);
  }
});

test("a core that stands still for 8 s: refused within seconds, not ready, then ready and all right", async () => {
  await using folder = await Folder.make();
  await using stub = await StubWorker.listen();
  const model = stubModel([stub], { timeouts: patient });
  const engine = { kind: "memory", dataDir: `${folder.path}/data` };
  await using ferry = await Several.start({ engine, models: [model], admission: { mode: "off" } });
  const [a, b] = ferry.doors();
  process.kill(ferry.core, "SIGSTOP");
  const from = performance.now();
  const first = await a!.post({ input: "first" });
  assertError(first, 503, "SERVICE_OVERLOADED");
  assert.ok(performance.now() - from < 8000, `${performance.now() - from} ms`);
  const next = performance.now();
  assertError(await a!.post({ input: "next" }), 503, "SERVICE_OVERLOADED");
  assert.ok(performance.now() - next < 2000, `${performance.now() - next} ms`);
  await pause(Math.max(0, 8000 - (performance.now() - from)));
  process.kill(ferry.core, "SIGCONT");
  for (const door of [a!, b!]) {
    await eventually(async () => (await door.get("/readyz")).status === 200);
    await eventually(async () => (await door.post({ input: `after ${door.pid}` })).status === 200);
  }
});
