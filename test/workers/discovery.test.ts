/** Workers that DNS names, on virtual time, with a resolver that says what the test wants. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { Discovery } from "../../src/workers/discovery.ts";
import { dnsName, plainUrl } from "../../src/app/config/worker-addresses.ts";
import { Roster } from "../../src/workers/roster.ts";
import { codes, endings } from "../dispatch/simulated.ts";
import { emptyModel } from "./network-workers.ts";

const NAME = "dns://gpu.default.svc:9000/infer";
const [A, B] = ["10.0.0.1", "10.0.0.2"];
const EVERY_MS = 5000;
const GRACE_MS = 15_000;
const rules = { everyMs: EVERY_MS, graceMs: GRACE_MS, maxAddresses: 3, servers: [] };

function stage(changes: Parameters<typeof emptyModel>[0] = {}) {
  const model = emptyModel({ queueMs: 600_000, totalMs: 1_200_000, ...changes });
  const { roster, clock, events } = model;
  const dns = { answer: (): readonly string[] | "never" => [], asked: 0 };
  const joining = {
    join: (url: string, host: string, from: string) => roster.join("m", url, host, from),
    leave: (url: string) => roster.leave("m", url),
  };
  const discover = (written = NAME): Discovery =>
    new Discovery("m", dnsName(written, "http"), rules, joining, {
      clock,
      events,
      resolve: () => {
        dns.asked++;
        return new Promise((resolve) => {
          const answer = dns.answer();
          if (answer !== "never") resolve(answer);
        });
      },
    });
  return { ...model, dns, discover };
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
    const { simulation, dns, discover, names, backend, roster } = stage();
    dns.answer = () => [B, A, A];
    await discover().start();
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
    await assert.rejects(roster.remove("10.0.0.1:9000"), told);
  });

  test("that cannot be looked up changes nothing, and is told once", async () => {
    const { simulation, dns, discover, names, notices } = stage();
    dns.answer = away;
    await discover().start();
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
    const { simulation, dns, discover, names } = stage();
    dns.answer = () => [A];
    await discover().start();
    dns.answer = away;
    await simulation.run(10 * GRACE_MS);
    dns.answer = () => [A];
    await simulation.run(EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.1:9000"]);
  });

  test("with more addresses than may be used has the first of them, and it is told once", async () => {
    const { simulation, dns, discover, names, notices } = stage();
    dns.answer = () => ["10.0.0.9", "10.0.0.5", "10.0.0.7", "10.0.0.8"];
    const discovery = discover();
    await discovery.start();
    await simulation.run(3 * EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.5:9000", "10.0.0.7:9000", "10.0.0.8:9000"]);
    const told = `warn: model m: ${NAME} has 4 addresses, of which 3 are used`;
    assert.deepEqual(notices, [told]);
    discovery.retune({ ...rules, maxAddresses: 4 });
    await simulation.run(EVERY_MS);
    assert.equal(names().length, 4);
    discovery.retune({ ...rules, maxAddresses: 2 });
    await simulation.run(GRACE_MS + 2 * EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.5:9000", "10.0.0.7:9000"]);
    assert.equal(notices.length, 2);
  });

  test("without an address is no error: workers may come", async () => {
    const { simulation, dns, discover, names, notices } = stage();
    await discover().start();
    await simulation.run(4 * EVERY_MS);
    assert.deepEqual(notices, [`info: model m: ${NAME} has no address now; workers may come`]);
    dns.answer = () => [A];
    await simulation.run(EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.1:9000"]);
  });

  test("that shares an address with another worker of Ferry's is told, once", async () => {
    const { simulation, dns, discover, names, roster, notices } = stage();
    await roster.add("m", "http://10.0.0.1:9000/infer");
    dns.answer = () => [A, B];
    await discover().start();
    await simulation.run(5 * EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.1:9000", "10.0.0.2:9000"]);
    assert.equal(notices.length, 1);
    assert.match(notices[0]!, /http:\/\/10\.0\.0\.1:9000\/infer is a worker of model m; it would get two/);
    await roster.remove("10.0.0.1:9000");
    await simulation.run(EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.1:9000", "10.0.0.2:9000"], "now it is this name's");
  });

  test("is not waited for longer than a round when the process starts, and not looked up after it stops", async () => {
    const { simulation, dns, discover } = stage();
    let started = false;
    dns.answer = () => "never";
    const discovery = discover();
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
  const { simulation, dispatcher, model, clock, events, names } = stage();
  const places: Record<string, string[]> = { one: [A, B], two: ["10.0.0.3"] };
  const resolve = (name: string): Promise<string[]> => Promise.resolve(places[name]!);
  const roster = new Roster([model], { clock, events, resolve });
  const follow = (...written: string[]): Promise<void> =>
    roster.follow("m", {
      kind: "http",
      workers: written,
      dnsMs: EVERY_MS,
      dnsServers: [],
    });
  await follow("dns://one:1/", "http://fixed:1/");
  assert.deepEqual(names(), ["10.0.0.1:1", "10.0.0.2:1"]);
  assert.equal(roster.foundBy("m", dispatcher.workers.slots[0]!), "dns://one:1/");
  await follow("dns://one:1/", "dns://two:1/");
  assert.deepEqual(names(), ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]);
  await follow("dns://two:1/");
  await simulation.run(10);
  assert.deepEqual(names(), ["10.0.0.3:1"]);
  await simulation.run(3 * GRACE_MS);
  assert.deepEqual(names(), ["10.0.0.3:1"], "the old name is not looked up any more");
  roster.stop();
});

test("whatever DNS says, no task is lost", async () => {
  const addresses = fc.subarray([A, B, "10.0.0.3", "10.0.0.4"]);
  const answers = fc.array(fc.oneof({ weight: 4, arbitrary: addresses }, fc.constant("away" as const)), {
    minLength: 1,
    maxLength: 30,
  });
  const run = async (said: readonly ("away" | string[])[], seed: number): Promise<void> => {
    const { simulation, dns, discover, names, dispatcher, backend } = stage({
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
    await discover().start();
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
