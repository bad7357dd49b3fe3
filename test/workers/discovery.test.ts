/** Workers that DNS names, on virtual time, with a resolver that says what the test wants. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { Discovery } from "../../src/workers/discovery.ts";
import { dnsName, plainUrl } from "../../src/app/config/worker-addresses.ts";
import { codes, endings } from "../dispatch/simulated.ts";
import { emptyModel, httpModel } from "./network-workers.ts";

const NAME = "dns://gpu.default.svc:9000/infer";
const [A, B] = ["10.0.0.1", "10.0.0.2"];
const EVERY_MS = 5000;
const GRACE_MS = 15_000;
function stage(changes: Parameters<typeof emptyModel>[0] = {}) {
  const dns = { answer: (): readonly string[] | "never" => [], asked: 0 };
  const resolve = (): Promise<readonly string[]> => {
    dns.asked++;
    return new Promise((found) => {
      const answer = dns.answer();
      if (answer !== "never") found(answer);
    });
  };
  const model = httpModel([NAME]);
  const patient = { queueMs: 600_000, totalMs: 1_200_000, ...changes };
  const empty = emptyModel(patient, model, { resolve });
  return { ...empty, dns, resolve, start: () => empty.pool.follow() };
}

const away = (): never => {
  throw Object.assign(new Error("query failed"), { code: "ESERVFAIL" });
};

describe("names", () => {
  test("stand for a URL at each address, asked for by the name", () => {
    assert.equal(dnsName(NAME, "http").at(A), "http://10.0.0.1:9000/infer");
    assert.equal(dnsName("dns+https://gpu/v1?x=1", "http").at("fd00::1"), "https://[fd00::1]/v1?x=1");
    assert.equal(dnsName("dns://gpu:8001", "grpc").at(A), "grpc://10.0.0.1:8001");
    assert.equal(dnsName("dns+grpcs://gpu:8001", "grpc").at(A), "grpcs://10.0.0.1:8001");
    assert.equal(dnsName(NAME, "http").host, "gpu.default.svc:9000");
    assert.equal(plainUrl(NAME, "http"), "http://gpu.default.svc:9000/infer");
    assert.equal(dnsName("dns://gpu/?token=secret", "http").shown, "dns://gpu/");
  });
});

describe("a name of DNS", () => {
  test("is one worker at each address; new ones join, those that vanish go after the grace", async () => {
    const { simulation, dns, start, names, backend, operator } = stage();
    dns.answer = () => [B, A, A];
    await start();
    assert.deepEqual(names(), ["10.0.0.1:9000", "10.0.0.2:9000"]);
    assert.deepEqual([...backend.hosts.values()], ["gpu.default.svc:9000", "gpu.default.svc:9000"]);
    dns.answer = () => [A, "10.0.0.3"];
    await simulation.run(EVERY_MS + 1);
    assert.deepEqual(names(), ["10.0.0.1:9000", "10.0.0.2:9000", "10.0.0.3:9000"]);
    dns.answer = () => [A, B];
    await simulation.run(GRACE_MS - EVERY_MS);
    assert.equal(names().length, 3);
    dns.answer = () => [A];
    await simulation.run(EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.1:9000", "10.0.0.2:9000"], "B was back in time, the third was not");
    await simulation.run(GRACE_MS);
    assert.deepEqual(names(), ["10.0.0.1:9000"]);
    const told =
      /dns:\/\/gpu\.default\.svc:9000\/infer names 10\.0\.0\.1:9000; drain it, or take it out of DNS$/;
    await assert.rejects(operator.remove("10.0.0.1:9000"), told);
  });

  test("that cannot be looked up changes nothing, and is told once", async () => {
    const { simulation, dns, start, names, notices } = stage();
    dns.answer = away;
    await start();
    await simulation.run(3 * EVERY_MS);
    dns.answer = () => [A];
    await simulation.run(EVERY_MS);
    dns.answer = away;
    await simulation.run(20 * EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.1:9000"]);
    const known = "the workers that are known stay, and it is tried every 5000 ms";
    assert.deepEqual(notices, [
      `warn: model m: ${NAME} cannot be looked up (ESERVFAIL); ${known}`,
      `info: model m: ${NAME} is found again`,
      `warn: model m: ${NAME} cannot be looked up (ESERVFAIL); ${known}`,
    ]);
  });

  test("a failure does not hurry the grace: what is missing must be missing in an answer", async () => {
    const { simulation, dns, start, names } = stage();
    dns.answer = () => [A];
    await start();
    dns.answer = away;
    await simulation.run(10 * GRACE_MS);
    dns.answer = () => [A];
    await simulation.run(EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.1:9000"]);
  });

  test("with more addresses than may be used has the first of them, and it is told once", async () => {
    const { simulation, clock, events, notices } = stage();
    const many = Array.from({ length: 1030 }, (_, at) => `10.0.${at >> 8}.${at & 255}`);
    const rules = { everyMs: EVERY_MS, servers: [] };
    const parts = { clock, events, resolve: () => Promise.resolve(many) };
    const discovery = new Discovery(
      "m",
      dnsName(NAME, "http"),
      () => rules,
      async () => {},
      parts,
    );
    await discovery.start();
    await simulation.run(3 * EVERY_MS);
    const first = many.toSorted().slice(0, 1024);
    assert.deepEqual(
      [...discovery.urls],
      first.map((each) => dnsName(NAME, "http").at(each)),
    );
    assert.deepEqual(notices, [`warn: model m: ${NAME} has 1030 addresses, of which 1024 are used`]);
    discovery.stop();
  });

  test("without an address is no error: workers may come", async () => {
    const { simulation, dns, start, names, notices } = stage();
    await start();
    await simulation.run(4 * EVERY_MS);
    assert.deepEqual(notices, [`info: model m: ${NAME} has no address now; workers may come`]);
    dns.answer = () => [A];
    await simulation.run(EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.1:9000"]);
  });

  test("that shares an address with another worker of Ferry's is told, once", async () => {
    const { simulation, dns, start, names, operator, notices } = stage();
    await operator.add("m", "http://10.0.0.1:9000/infer");
    dns.answer = () => [A, B];
    await start();
    await simulation.run(5 * EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.1:9000", "10.0.0.2:9000"]);
    assert.equal(notices.length, 1);
    assert.match(notices[0]!, /http:\/\/10\.0\.0\.1:9000\/infer is a worker of model m; it would get two/);
    await operator.remove("10.0.0.1:9000");
    await simulation.run(EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.1:9000", "10.0.0.2:9000"], "now it is this name's");
  });

  test("is not waited for longer than a round when the process starts, and not looked up after it stops", async () => {
    const { simulation, dns, clock, events, resolve } = stage();
    let started = false;
    dns.answer = () => "never";
    const rules = { everyMs: EVERY_MS, servers: [] };
    const parts = { clock, events, resolve };
    const discovery = new Discovery(
      "m",
      dnsName(NAME, "http"),
      () => rules,
      async () => {},
      parts,
    );
    const start = discovery.start().then(() => (started = true));
    await simulation.run(EVERY_MS - 1);
    assert.equal(started, false);
    await simulation.run(2);
    await start;
    discovery.stop();
    await simulation.run(10 * EVERY_MS);
    assert.equal(dns.asked, 1);
  });
});

test("a model that follows other names lets those of the old ones go", async () => {
  const places: Record<string, string[]> = { one: [A, B], two: ["10.0.0.3"] };
  const resolve = (name: string): Promise<string[]> => Promise.resolve(places[name]!);
  const { simulation, dispatcher, names, pool, change } = emptyModel({}, httpModel(["dns://one:1/"]), {
    resolve,
  });
  const follow = async (...workers: string[]): Promise<void> => {
    await change(httpModel(workers));
    await simulation.run(10);
  };
  await pool.follow();
  assert.deepEqual(names(), ["10.0.0.1:1", "10.0.0.2:1"]);
  assert.equal(pool.of("m")!.foundBy(dispatcher.workers.slots[0]!), "dns://one:1/");
  await follow("dns://one:1/", "dns://two:1/");
  assert.deepEqual(names(), ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]);
  await follow("dns://two:1/");
  assert.deepEqual(names(), ["10.0.0.3:1"]);
  await simulation.run(3 * GRACE_MS);
  assert.deepEqual(names(), ["10.0.0.3:1"], "the old name is not looked up any more");
  await pool.drain();
});

test("whatever DNS says, no task is lost", async () => {
  const addresses = fc.subarray([A, B, "10.0.0.3", "10.0.0.4"]);
  const answers = fc.array(fc.oneof({ weight: 4, arbitrary: addresses }, fc.constant("away" as const)), {
    minLength: 1,
    maxLength: 30,
  });
  const run = async (said: readonly ("away" | string[])[], seed: number): Promise<void> => {
    const { simulation, dns, start, names, dispatcher, backend } = stage({
      limits: { maxBatchSize: 4 },
      backend: { workers: 1, baseMs: 700, perItemMs: 0 },
      seed,
    });
    const ended = endings(simulation);
    let at = 0;
    dns.answer = () => {
      const answer = said[at++];
      return answer === undefined ? [A] : answer === "away" ? away() : answer;
    };
    await start();
    const arrivals = Array.from({ length: said.length * 10 }, (_, each) => each * (EVERY_MS / 10));
    simulation.schedule(arrivals, () => void simulation.put());
    await simulation.run((said.length + 1) * EVERY_MS + GRACE_MS + 400 * 700);
    assert.equal(ended.size, arrivals.length);
    assert.deepEqual([...new Set(codes(ended))], ["ok"]);
    assert.deepEqual(names(), ["10.0.0.1:9000"]);
    assert.equal(backend.workers.length, dispatcher.workers.slots.length);
  };
  await fc.assert(fc.asyncProperty(answers, fc.integer({ min: 1, max: 1000 }), run), { numRuns: 40 });
});
