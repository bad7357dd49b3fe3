/** What `ferry serve` says, to people and to programs. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import {
  capacityPerSecond,
  drainBanner,
  drainLine,
  farewellBanner,
  farewellLine,
  readyBanner,
  readyLine,
  redisPlace,
  urlOf,
  type ReadyFacts,
} from "../../src/cli/terminal/banner.ts";
import { demoConfig, parseConfig } from "../../src/app/config/load.ts";
import type { Config } from "../../src/app/config/config.ts";
import { printable, wantsColor } from "../../src/cli/terminal/terminal.ts";

function configOf(text: string): Config {
  const { config, problems } = parseConfig(text, "ferry.yaml", {});
  assert.deepEqual(problems, undefined);
  return config;
}
function factsOf(config: Config): ReadyFacts {
  return {
    config,
    role: "all",
    version: "0.4.0",
    apiUrl: "http://127.0.0.1:8080",
    adminUrl: "http://127.0.0.1:8081",
    startMs: 179.6,
  };
}
const http = (name: string) =>
  `{ name: ${name}, backend: { kind: http, workers: [http://gpu-${name}:9000/x] } }`;
const tally = { requests: 18_402, batches: 331, tasks: 18_402, calls: 331, lost: 0, queued: 0, running: 0 };
const now = Date.parse("2026-01-05T10:00:00.180Z");

describe("ready", () => {
  test("the demo's banner", () => {
    assert.equal(
      readyBanner(factsOf(demoConfig()), false),
      `  FERRY v0.4.0  ready in 180 ms    DEMO: simulated GPU, 100 ms a batch
  ➜  API        http://127.0.0.1:8080/v1/inference
  ➜  Dashboard  http://127.0.0.1:8081/
     Model      demo   4 workers × 64 / 100 ms = up to 2,560 req/s, plan with 1,790
     Engine     memory, nothing kept on disk    set engine.dataDir to survive a restart
     Try        curl -s --json '{"input":"hello"}' http://127.0.0.1:8080/v1/inference
  !  auth: none, anyone who reaches the port is tenant "anonymous"
`,
    );
  });

  test("several processes are one banner", () => {
    const config = configOf(`models: [${http("a")}, { name: b, backend: { kind: simulated, workers: 2 } }]`);
    const facts = { ...factsOf(config), processes: 3 };
    assert.match(readyBanner(facts, false), /ready in \d+ ms.* {4}3 gateway processes$/m);
    assert.match(readyBanner({ ...facts, keys: true }, false), /anonymous" {4}press h for keys$/m);
    const line = JSON.parse(readyLine(facts, now));
    assert.deepEqual([line.processes, line.workers], [3, 3]);
  });

  test("a real backend claims no capacity and no demo", () => {
    const banner = readyBanner(
      factsOf(configOf(`engine: { dataDir: /data }\nmodels: [${http("a")}]`)),
      false,
    );
    assert.match(banner, /^ {5}Model {6}a {3}1 worker × 64 \(http\), capacity is learned from traffic$/m);
    assert.match(banner, /^ {5}Engine {5}memory, kept on disk in \/data$/m);
    assert.doesNotMatch(banner, /DEMO|req\/s/);
  });

  test("one simulated model among others is still a demo, and the curl names a model", () => {
    const text = `models: [${http("a")}, { name: b, backend: { kind: simulated, perItemMs: 1 } }]`;
    const banner = readyBanner(factsOf(configOf(text)), false);
    assert.match(banner, /DEMO: simulated GPU, 164 ms a full batch$/m);
    assert.match(banner, /curl -s --json '\{"model":"a","input":"hello"\}' /);
  });

  test("where credentials are asked for, the curl shows where one goes", () => {
    const text = `auth: { mode: required, keysFile: ./keys.json }\nmodels: [${http("a")}]`;
    const banner = readyBanner(factsOf(configOf(text)), false);
    assert.match(banner, /curl -s -H "Authorization: Bearer \$FERRY_KEY" --json /);
  });

  test("never more than nine lines, whatever is configured", () => {
    for (const count of [1, 2, 3, 4, 50]) {
      const names = Array.from({ length: count }, (_, index) => http(`m${index}`));
      const lines = readyBanner(factsOf(configOf(`models: [${names.join(", ")}]`)), false)
        .trimEnd()
        .split("\n");
      assert.ok(lines.length <= 9, `${count} models: ${lines.length} lines`);
      assert.equal(
        lines.some((line) => line.includes("more models")),
        count > 3,
      );
    }
  });

  test("a quote in a model's name cannot leave the quotes of the curl line", () => {
    const text =
      "models: [{ name: a'b, backend: { kind: simulated } }, { name: c, backend: { kind: simulated } }]";
    const banner = readyBanner(factsOf(configOf(text)), false);
    assert.ok(banner.includes(String.raw`'{"model":"a'\''`), banner);
  });

  test("people are shown an address they can go to", () => {
    const facts = { ...factsOf(demoConfig()), apiUrl: "http://0.0.0.0:8080", adminUrl: "http://[::]:8081" };
    assert.match(
      readyBanner(facts, false),
      /API {8}http:\/\/127\.0\.0\.1:8080\/v1.*\n.*Dashboard {2}http:\/\/\[::1\]:8081\/\n/,
    );
  });

  test("the dashboard comes with its token, and only where there is one", () => {
    const text = (admin: string) => `admin: { ${admin} }\nmodels: [${http("a")}]`;
    const facts = factsOf(configOf(text('token: "a-secret/of#16+"')));
    assert.match(
      readyBanner(facts, false),
      /Dashboard {2}http:\/\/127\.0\.0\.1:8081\/#token=a-secret%2Fof%2316%2B\n/,
    );
    assert.ok(!readyLine(facts, now).includes("secret"), "a log gets no token");
    const off = configOf(`telemetry: { dashboard: false }\n${text("")}`);
    const banner = readyBanner(factsOf(off), false);
    assert.match(banner, /Admin {6}http:\/\/127\.0\.0\.1:8081\/internal\/health\n/);
    assert.doesNotMatch(banner, /Dashboard/);
  });

  test("keys are hinted at where they do something", () => {
    const last = (config: Config, role: ReadyFacts["role"] = "all") =>
      readyBanner({ ...factsOf(config), role, keys: true }, false)
        .trimEnd()
        .split("\n")
        .at(-1);
    assert.match(last(demoConfig())!, /tenant "anonymous" {4}press l for load, h for keys$/);
    const models = `models: [${http("a")}, ${http("b")}, ${http("c")}]`;
    assert.match(last(configOf(models))!, /tenant "anonymous" {4}press h for keys$/);
    const closed = configOf(`auth: { mode: required, keysFile: ./keys.json }\n${models}`);
    assert.equal(last(closed), "     press h for keys");
    for (const config of [configOf(models), closed])
      assert.ok(readyBanner({ ...factsOf(config), keys: true }, false).split("\n").length <= 10);
  });

  test("one JSON line for programs", () => {
    const line = readyLine(factsOf(demoConfig()), now);
    assert.ok(line.endsWith("}\n") && !line.slice(0, -1).includes("\n"));
    assert.deepEqual(JSON.parse(line), {
      level: "info",
      time: "2026-01-05T10:00:00.180Z",
      msg: "ready",
      version: "0.4.0",
      role: "all",
      listen: "http://127.0.0.1:8080",
      admin: "http://127.0.0.1:8081",
      engine: "memory",
      durability: "none",
      models: 1,
      workers: 4,
      startMs: 180,
      demo: true,
    });
  });

  test("colour only when asked, and it changes nothing else", () => {
    const facts = factsOf(demoConfig());
    const plain = readyBanner(facts, false);
    const colored = readyBanner(facts, true);
    assert.ok(!plain.includes("\u001b"));
    assert.ok(colored.includes("\u001b[32m"));
    assert.equal(colored.replace(/\u001b\[\d+m/g, ""), plain);
  });
});

describe("on Redis", () => {
  const config = configOf(`
engine: { kind: redis, url: "redis://ferry:hunter2@redis-1:7001/0" }
models: [${http("a")}, { name: b, maxBatchSize: 8, backend: { kind: simulated } }]
`);
  const facts: ReadyFacts = { ...factsOf(config), durability: "replica" };

  test("a gateway shows no workers of its own", () => {
    assert.equal(
      readyBanner({ ...facts, role: "gateway" }, false),
      `  FERRY v0.4.0 gateway  ready in 180 ms    DEMO: simulated GPU, 100 ms a batch
  ➜  API        http://127.0.0.1:8080/v1/inference
  ➜  Dashboard  http://127.0.0.1:8081/
     Model      a   batches of up to 64, run by batchers
     Model      b   batches of up to 8, run by batchers
     Engine     redis redis-1:7001, durability replica
     Try        curl -s --json '{"model":"a","input":"hello"}' http://127.0.0.1:8080/v1/inference
  !  auth: none, anyone who reaches the port is tenant "anonymous"
`,
    );
    const line = JSON.parse(readyLine({ ...facts, role: "gateway" }, now)) as object;
    assert.partialDeepStrictEqual(line, {
      role: "gateway",
      engine: "redis",
      durability: "replica",
      workers: 0,
    });
  });

  test("a batcher has no address for clients", () => {
    const batcher: ReadyFacts = { ...facts, role: "batcher", apiUrl: "", durability: "local" };
    assert.equal(
      readyBanner(batcher, false),
      `  FERRY v0.4.0 batcher  ready in 180 ms    DEMO: simulated GPU, 100 ms a batch
  ➜  Dashboard  http://127.0.0.1:8081/
     Model      a   1 worker × 64 (http), capacity is learned from traffic
     Model      b   1 worker × 8 / 100 ms = up to 80 req/s, plan with 56
     Engine     redis redis-1:7001, durability local    one server keeps the accepted tasks
`,
    );
    const line = JSON.parse(readyLine(batcher, now)) as object;
    assert.ok(!("listen" in line));
    assert.partialDeepStrictEqual(line, { role: "batcher", durability: "local", models: 2, workers: 2 });
  });

  test("where Redis is, and never who we are there", () => {
    const place = (engine: string) => {
      const { engine: made } = configOf(`engine: { kind: redis, ${engine} }\nmodels: [${http("a")}]`);
      assert.ok(made.kind === "redis");
      return redisPlace(made);
    };
    assert.equal(place('url: "rediss://u:hunter2@cache.example"'), "cache.example:6379");
    assert.equal(place('url: "redis://[::1]:7000"'), "[::1]:7000");
    assert.equal(place("nodes: [r:1], password: hunter2"), "r:1");
    assert.equal(place('nodes: ["[::1]:1", r:2, r:3]'), "[::1]:1 and 2 more");
    // Until the engine has said what it is, the config's own word.
    assert.match(readyBanner(factsOf(config), false), /Engine {5}redis redis-1:7001, durability auto\n/);
    for (const role of ["all", "gateway", "batcher"] as const) {
      const said = readyBanner({ ...facts, role }, true) + readyLine({ ...facts, role }, now);
      assert.ok(!said.includes("hunter2"));
    }
  });

  test("each role says what it did", () => {
    assert.match(drainBanner(tally, config, "SIGTERM"), /accepted tasks are in Redis and go on\)/);
    assert.equal(farewellBanner(tally, config, "gateway"), "  served 18,402 requests, 0 lost\n");
    assert.equal(
      farewellBanner({ ...tally, requests: 0 }, config, "batcher"),
      "  ran 18,402 tasks in 331 batches (55.6 on average), 18,071 GPU calls saved, 0 lost\n",
    );
  });
});

describe("the end", () => {
  test("draining says what is left, for how long, and what a second signal costs", () => {
    const left = { ...tally, queued: 35, running: 2 };
    assert.equal(
      drainBanner(left, demoConfig(), "SIGINT"),
      "  draining: 35 requests, 2 batches, at most 15 s (Ctrl-C again to stop now; accepted tasks end with the process)\n",
    );
    const kept = configOf(`engine: { dataDir: /data }\nmodels: [${http("a")}]`);
    assert.match(
      drainBanner(left, kept, "SIGTERM"),
      /\(SIGTERM again to stop now; accepted tasks are on disk and go on/,
    );
    const line = JSON.parse(drainLine(left, kept, "SIGTERM", now)) as object;
    assert.partialDeepStrictEqual(line, {
      msg: "draining",
      signal: "SIGTERM",
      requests: 35,
      batches: 2,
      atMostMs: 15_000,
    });
  });

  test("the farewell", () => {
    assert.equal(
      farewellBanner(tally, demoConfig()),
      "  served 18,402 requests in 331 batches (55.6 of 64 full), 18,071 GPU calls saved, 0 lost\n",
    );
    assert.equal(
      farewellBanner({ ...tally, requests: 1, tasks: 1, batches: 1, calls: 2, queued: 1 }, demoConfig()),
      "  served 1 request in 1 batch (1.0 of 64 full), 0 GPU calls saved, 1 request not answered, 0 lost\n",
    );
    const nothing = { requests: 0, batches: 0, tasks: 0, calls: 0, lost: 0, queued: 0, running: 0 };
    assert.equal(
      farewellBanner(nothing, demoConfig()),
      "  served 0 requests in 0 batches, 0 GPU calls saved, 0 lost\n",
    );
    assert.partialDeepStrictEqual(JSON.parse(farewellLine(tally, now)), {
      msg: "stopped",
      gpuCallsSaved: 18_071,
      lost: 0,
    });
    assert.partialDeepStrictEqual(JSON.parse(farewellLine({ ...tally, lost: 1 }, now)), {
      level: "error",
      lost: 1,
    });
  });

  test("models with different batch sizes have no common 'full'", () => {
    const config = configOf(
      "models: [{ name: a, backend: { kind: simulated } }, { name: b, maxBatchSize: 8, backend: { kind: simulated } }]",
    );
    assert.match(farewellBanner(tally, config), /\(55\.6 on average\)/);
  });
});

describe("what the lines are made of", () => {
  test("capacity is known for simulated workers only", () => {
    const [simulated, real, instant, padded] = configOf(
      `models: [{ name: s, maxBatchSize: 10, backend: { kind: simulated, workers: 2, baseMs: 90, perItemMs: 1 } }, ${http("r")}, { name: i, backend: { kind: simulated, baseMs: 0 } }, { name: p, backend: { kind: simulated, perTokenMs: 0.01 } }]`,
    ).models;
    assert.equal(capacityPerSecond(simulated!), 200);
    assert.equal(capacityPerSecond(real!), undefined);
    assert.equal(capacityPerSecond(instant!), undefined);
    assert.equal(capacityPerSecond(padded!), undefined);
  });

  test("a listener on any host is reached on loopback", () => {
    assert.equal(urlOf({ host: "0.0.0.0", port: 1 }), "http://127.0.0.1:1");
    assert.equal(urlOf({ host: "::", port: 1 }), "http://[::1]:1");
    assert.equal(urlOf({ host: "::1", port: 1 }), "http://[::1]:1");
    assert.equal(urlOf({ host: "gpu", port: 1 }), "http://gpu:1");
  });

  test("colour: flag, then NO_COLOR, then FORCE_COLOR, then the terminal", () => {
    const wants = (env: NodeJS.ProcessEnv, isTTY: boolean, noColor = false) =>
      wantsColor({ env, isTTY, noColor });
    assert.equal(wants({}, true), true);
    assert.equal(wants({}, false), false);
    assert.equal(wants({ TERM: "dumb" }, true), false);
    assert.equal(wants({ NO_COLOR: "1" }, true), false);
    assert.equal(wants({ NO_COLOR: "" }, true), true);
    assert.equal(wants({ FORCE_COLOR: "1" }, false), true);
    assert.equal(wants({ FORCE_COLOR: "1", TERM: "dumb" }, false), true);
    assert.equal(wants({ FORCE_COLOR: "0" }, true), false);
    assert.equal(wants({ FORCE_COLOR: "1", NO_COLOR: "1" }, true), false);
    assert.equal(wants({ FORCE_COLOR: "1" }, true, true), false);
  });

  test("text from outside cannot steer a terminal", () => {
    assert.equal(printable("a\u001b[31mb\r\nc\u009b\u202e"), "a·[31mb··c··");
    assert.equal(printable("a\u061cb\u200ec\u200fd"), "a·b·c·d");
    assert.equal(printable("Grüße, 世界"), "Grüße, 世界");
  });
});
