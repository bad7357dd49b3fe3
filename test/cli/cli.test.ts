/** The command line, from outside: help, usage, check, dead, and bin/ferry itself. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { copyFileSync, mkdirSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { createServer, type IncomingMessage } from "node:http";
import type { AddressInfo } from "node:net";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { check } from "../../src/cli/check.ts";
import type { Command } from "../../src/cli/command.ts";
import { dead, formatAge, parseAge } from "../../src/cli/dead.ts";
import { keys } from "../../src/cli/keys.ts";
import { plan } from "../../src/cli/plan.ts";
import { serve } from "../../src/cli/serve.ts";
import { top } from "../../src/cli/top.ts";
import { workers } from "../../src/cli/workers.ts";
import { versionCommand } from "../../src/cli/version.ts";
import { bin, ferry, file, folder, run, type Ended } from "./cli-child.ts";
import { startServer } from "../engine/redis-client/servers.ts";

const good = () => file("good.yaml", "models: [{ name: a, backend: { kind: simulated, workers: 4 } }]\n");

describe("help and usage", () => {
  test("help is a result: on stdout, exit 0, with two examples", async () => {
    const calls = [[], ["help"], ["--help"], ["-h"]];
    const [bare, ...others] = await Promise.all(calls.map((args) => ferry(...args)));
    assert.equal(bare!.code, 0);
    assert.match(bare!.out, /Usage: ferry COMMAND/);
    for (const other of others) assert.deepEqual(other, bare);
    const commands: { readonly [name: string]: Command } = {
      serve,
      check,
      dead,
      keys,
      plan,
      top,
      workers,
      version: versionCommand,
    };
    for (const [name, { usage, flags }] of Object.entries(commands)) {
      const [long, short, help] = await Promise.all([
        ferry(name, "--help"),
        ferry(name, "-h"),
        ferry("help", name),
      ]);
      assert.equal(long.code, 0);
      assert.equal(long.err, "");
      assert.equal(long.out.match(/^ {2}ferry .* # .*$/gm)?.length, 2, long.out);
      assert.ok(long.out.includes(`Usage: ferry ${usage}\n`));
      for (const flag of Object.keys(flags)) assert.ok(long.out.includes(`--${flag}`), flag);
      assert.deepEqual(short, long);
      assert.deepEqual(help, long);
    }
  });

  test("the version", async () => {
    const [word, flag, json] = await Promise.all([
      ferry("version"),
      ferry("--version"),
      ferry("version", "--json"),
    ]);
    assert.match(word.out, /^ferry \d+\.\d+\.\d+\S*\n$/);
    assert.deepEqual(flag, word);
    assert.deepEqual(Object.keys(JSON.parse(json.out) as object), ["version", "node"]);
  });

  const wrong: readonly (readonly [string, RegExp])[] = [
    ["serv", /^ferry: unknown command serv; did you mean serve\?\nUsage: ferry COMMAND/],
    ["help chekc", /unknown command chekc; did you mean check\?/],
    ["--verison", /unknown flag --verison; did you mean --version\?/],
    ["serve --confg x", /^ferry: unknown flag --confg; did you mean --config\?\nUsage: ferry serve/],
    ["serve --role gatway", /--role gatway is not one of all, gateway, batcher; did you mean gateway\?/],
    ["serve -c", /^ferry: --config needs a value\n/],
    ["serve -c --role", /^ferry: -c needs a value\n/],
    ["check --json=1", /--json takes no value/],
    ["check ferry.yaml", /unexpected ferry\.yaml; did you mean -c ferry\.yaml\?/],
    ["dead", /dead needs a word; one of list, show, replay, purge/],
    ["dead lst", /dead lst is unknown; did you mean list\?/],
    ["dead show", /dead show needs a task id/],
    ["dead replay a b", /dead replay: unexpected b/],
    ["dead show ../x", /is no task id/],
    ["dead purge --older-than soon", /--older-than soon is no age; write 90s, 15m, 12h or 7d/],
    ["dead purge x --code Y", /leave out the task id/],
    ["dead list --admin ftp://x", /--admin must be a URL/],
    ["keys", /keys needs a word; one of create, list, revoke/],
    ["keys lst", /keys lst is unknown; did you mean list\?/],
    ["keys create --tier paid", /keys create needs --user USER/],
    ["keys create --user u1", /keys create needs --tier TIER/],
    ["keys create --user u\u0007 --tier paid", /--user must have 1 to 255 characters/],
    ["keys list u1", /keys list: unexpected u1/],
    ["keys list --user u1", /keys list: --user is for keys create/],
    ["keys revoke", /keys revoke needs the id of a key/],
    ["keys revoke ../x", /that is no id of a key/],
  ];
  for (const [line, expected] of wrong) {
    test(`ferry ${line}: exit 2`, async () => {
      const { code, out, err } = await ferry(...line.split(" "));
      assert.equal(code, 2);
      assert.equal(out, "");
      assert.match(err, expected);
      assert.match(err, /\nUsage: ferry /);
      assert.doesNotMatch(err, / at /);
    });
  }
});

test("one role of several needs Redis: exit 1, one line that says why", async () => {
  for (const role of ["gateway", "batcher"]) {
    for (const args of [[], ["-c", good()]]) {
      const { code, out, err } = await ferry("serve", "--role", role, ...args);
      assert.deepEqual([code, out], [1, ""]);
      assert.match(
        err,
        /^ferry: --role \w+ needs engine\.kind redis: two processes cannot share the memory of one; set [^\n]+\n$/,
      );
    }
  }
});

describe("check", () => {
  test("a good file", async () => {
    const { code, out, err } = await ferry("check", "-c", good());
    assert.deepEqual([code, err], [0, ""]);
    assert.match(
      out,
      /good\.yaml is valid: 1 model, 4 workers, up to 2,560 req\/s, tiers enterprise > paid > free\n$/,
    );
    const json = await ferry("check", "-c", good(), "--json");
    assert.partialDeepStrictEqual(JSON.parse(json.out), {
      valid: true,
      workers: 4,
      capacityPerSecond: 2560,
      warnings: [],
    });
  });

  test("a bad file: every problem, exit 1", async () => {
    const path = file(
      "bad.yaml",
      "listn: x\nmodels: [{ name: a, backend: { kind: simulated, workers: 0 } }]\n",
    );
    const { code, out } = await ferry("check", "-c", path);
    assert.equal(code, 1);
    assert.match(out, /bad\.yaml:1:1 +listn +unknown setting; did you mean listen\?\n/);
    assert.match(out, /bad\.yaml:2:58 +models\[0\]\.backend\.workers +0 is too small/);
    assert.match(out, /\n2 problems, nothing was started\.\n$/);
    const json = await ferry("check", "-c", path, "--json");
    assert.equal(json.code, 1);
    const { valid, problems } = JSON.parse(json.out) as {
      valid: boolean;
      problems: { line: number; path: string }[];
    };
    assert.equal(valid, false);
    assert.deepEqual(
      problems.map(({ line, path }) => [line, path]),
      [
        [1, "listn"],
        [2, "models[0].backend.workers"],
      ],
    );
  });

  test("warnings go to stderr and do not fail", async () => {
    const path = file(
      "warned.yaml",
      "limits: { drainMs: 1 }\nmodels: [{ name: a, backend: { kind: simulated } }]\n",
    );
    const { code, out, err } = await ferry("check", "-c", path);
    assert.equal(code, 0);
    assert.match(out, /is valid/);
    assert.match(err, /limits\.drainMs +warning: drainMs 1 ≤ totalMs 4000/);
  });

  test("./ferry.yaml is the default, a missing file is one line", async () => {
    const own = join(folder, "own");
    mkdirSync(own);
    const missing = await run(bin, ["check"], {}, own);
    assert.deepEqual([missing.code, missing.err], [1, ""]);
    assert.match(
      missing.out,
      /^ferry\.yaml {2}there is no such file; .*\n1 problem, nothing was started\.\n$/,
    );
    writeFileSync(join(own, "ferry.yaml"), "models: [{ name: a, backend: { kind: simulated } }]\n");
    assert.equal((await run(bin, ["check"], {}, own)).code, 0);
  });

  test("--probe asks Redis what a start would", async () => {
    await using server = await startServer({ maxmemory: "100mb", "maxmemory-policy": "noeviction" });
    const path = file(
      "redis.yaml",
      `engine: { kind: redis, url: "${server.url}", durability: \${DURABILITY:-auto} }
models: [{ name: a, backend: { kind: simulated } }]
`,
    );
    const plain = await ferry("check", "-c", path);
    assert.deepEqual([plain.code, plain.err], [0, ""]);
    const probed = await ferry("check", "-c", path, "--probe");
    assert.equal(probed.code, 0);
    const place = `127\\.0\\.0\\.1:${server.port}`;
    assert.match(probed.err, new RegExp(`engine\\.url +warning: redis ${place}: no replica is connected`));
    assert.match(
      probed.out,
      new RegExp(`is valid: .*\nredis ${place}: redis \\S+, 0 replicas, durability local\n$`),
    );
    await server.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru");
    const strict = await run(bin, ["check", "-c", path, "--probe"], { DURABILITY: "replica" });
    assert.equal(strict.code, 1);
    assert.match(
      strict.out,
      /maxmemory-policy is allkeys-lru.*\n.*no replica is connected.*\n2 problems, nothing/,
    );
    const json = await run(bin, ["check", "-c", path, "--probe", "--json"], { DURABILITY: "local" });
    assert.equal(json.code, 1);
    const told = JSON.parse(json.out) as { valid: boolean; redis: object[]; problems: { path: string }[] };
    assert.deepEqual([told.valid, told.problems.length, told.problems[0]?.path], [false, 1, "engine.url"]);
    assert.partialDeepStrictEqual(told.redis[0], { facts: { product: "redis", persistence: "aof" } });
    await server.stop();
    const gone = await ferry("check", "-c", path, "--probe");
    assert.equal(gone.code, 1);
    assert.match(gone.out, new RegExp(`redis ${place} is not reachable: .*; check that it runs and`));
    const memory = await ferry("check", "-c", good(), "--probe");
    assert.deepEqual(
      [memory.code, memory.err],
      [0, "nothing to probe: engine.kind is memory, which needs no other server\n"],
    );
  });

  test("serve refuses a bad file the same way, on stderr", async () => {
    const { code, out, err } = await ferry("serve", "-c", file("worse.yaml", "models: []\n"));
    assert.deepEqual([code, out], [1, ""]);
    assert.match(err, /models +is empty; add a model.*\n1 problem, nothing was started\.\n$/);
  });
});

describe("dead", () => {
  const old = { task_id: "01OLD", model: "embed", tier: "paid", attempts: 4, error: "INFERENCE_FAILED" };
  const letters = [
    { ...old, message: "gpu-2 answered 500: CUDA\u001b[2J out of memory", died_at: 1_000_000 },
    {
      ...old,
      task_id: "01NEW",
      error: "DEADLINE_EXCEEDED",
      message: "late",
      died_at: new Date().toISOString(),
    },
  ];
  let seen: string[] = [];
  const server = createServer((request: IncomingMessage, response) => {
    seen.push(`${request.method} ${request.url}`);
    const id = /^\/internal\/dead-letters\/(\w+)/.exec(request.url!)?.[1];
    const reply = (status: number, body?: object) => {
      response.writeHead(status, { "content-type": "application/json" });
      response.end(body === undefined ? "" : JSON.stringify(body));
    };
    if (request.headers.authorization !== "Bearer the-token") return reply(401, { error: "UNAUTHENTICATED" });
    if (id === undefined) return reply(200, { dead_letters: letters });
    const letter = letters.find((each) => each.task_id === id);
    if (id === "01BROKEN") return reply(500, { message: "disk full" });
    if (letter === undefined) return reply(404, { error: "NOT_FOUND" });
    if (request.method === "GET") return reply(200, { ...letter, input: { text: "x" } });
    if (request.method === "POST" && fullFor-- > 0) {
      return reply(503, { error: "SERVICE_OVERLOADED", message: "the queue is full", retry_after_ms: 5 });
    }
    return reply(request.method === "POST" ? 202 : 204);
  });
  /** So many replays find the queue full. */
  let fullFor = 0;
  let config = "";
  before(async () => {
    server.listen(0, "127.0.0.1");
    await once(server, "listening");
    const { port } = server.address() as AddressInfo;
    config = file(
      "dead.yaml",
      `admin: { listen: 127.0.0.1:${port}, token: \${TOKEN:-the-token} }\nmodels: [{ name: a, backend: { kind: simulated } }]\n`,
    );
  });
  after(() => server.close());
  const ferryDead = (...args: string[]) => {
    seen = [];
    return ferry("dead", ...args, "-c", config);
  };

  test("list: a table for people, one object a line for programs", async () => {
    const { code, out, err } = await ferryDead("list");
    assert.equal(code, 0);
    const [head, first, second] = out.split("\n");
    assert.match(head!, /^ {2}TASK +MODEL +TIER +AGE +TRIES +CODE +WHY$/);
    assert.match(
      first!,
      /^ {2}01OLD +embed +paid +\d+ d +4 +INFERENCE_FAILED +gpu-2 answered 500: CUDA·\[2J out of memory$/,
    );
    assert.match(second!, /^ {2}01NEW +embed +paid +\d+ s +4 +DEADLINE_EXCEEDED +late$/);
    assert.match(err, /2 dead letters\. {2}ferry dead show ID/);
    const json = await ferryDead("list", "--json");
    assert.deepEqual(
      json.out
        .trim()
        .split("\n")
        .map((line) => JSON.parse(line) as unknown),
      letters,
    );
  });

  test("list: --older-than and --code choose", async () => {
    assert.match(
      (await ferryDead("list", "--older-than", "7d", "--json")).out,
      /^\{"task_id":"01OLD".*\}\n$/,
    );
    assert.match(
      (await ferryDead("list", "--code", "deadline_exceeded", "--json")).out,
      /^\{"task_id":"01NEW".*\}\n$/,
    );
    assert.equal((await ferryDead("list", "--code", "NONE")).out, "no dead letters\n");
  });

  test("show and replay", async () => {
    const shown = await ferryDead("show", "01OLD");
    assert.match(shown.out, /^task_id +01OLD$/m);
    assert.match(shown.out, /^input +\{"text":"x"\}$/m);
    assert.partialDeepStrictEqual(JSON.parse((await ferryDead("show", "01OLD", "--json")).out), {
      input: { text: "x" },
    });
    assert.equal((await ferryDead("replay", "01OLD")).out, "replayed 01OLD\n");
    assert.deepEqual(seen, ["POST /internal/dead-letters/01OLD/replay"]);
  });

  test("replay of all: one after another, waiting while the queue is full", async () => {
    const asked = await ferryDead("replay");
    assert.equal(asked.code, 1);
    assert.match(asked.err, /dead replay: this would replay 2 dead letters; say --yes to do it/);
    fullFor = 2;
    const all = await ferryDead("replay", "--yes");
    assert.deepEqual([all.code, all.out], [0, "replayed 01OLD\nreplayed 01NEW\n"], all.err);
    const post = (id: string): string => `POST /internal/dead-letters/${id}/replay`;
    assert.deepEqual(seen.slice(1), [...Array<string>(3).fill(post("01OLD")), post("01NEW")]);
    const some = await ferryDead("replay", "--code", "deadline_exceeded", "--yes", "--json");
    assert.deepEqual(JSON.parse(some.out), { task_id: "01NEW", replayed: true });
  });

  test("replay of one that finds the queue full says when to try again", async () => {
    fullFor = 1;
    const { code, err } = await ferryDead("replay", "01OLD");
    assert.equal(code, 1);
    assert.match(err, /dead replay: .* answered 503: the queue is full; try again in 5 ms/);
  });

  test("purge needs --yes where nobody can be asked", async () => {
    const asked = await ferryDead("purge");
    assert.equal(asked.code, 1);
    assert.match(asked.err, /this would forget 2 dead letters; say --yes to do it/);
    assert.deepEqual(seen, ["GET /internal/dead-letters"]);
    assert.equal((await ferryDead("purge", "01OLD", "--yes")).out, "purged 1 dead letter\n");
    assert.deepEqual(seen, ["DELETE /internal/dead-letters/01OLD"]);
    assert.deepEqual(JSON.parse((await ferryDead("purge", "--older-than", "1h", "--yes", "--json")).out), {
      purged: 1,
    });
    assert.deepEqual(seen, ["GET /internal/dead-letters", "DELETE /internal/dead-letters/01OLD"]);
  });

  test("ages", () => {
    assert.deepEqual(["90s", "15m", "1.5h", "7d"].map(parseAge), [90_000, 900_000, 5_400_000, 604_800_000]);
    const ages = [-5, 59_999, 60_000, 3_600_000, 90_000_000].map(formatAge);
    assert.deepEqual(ages, ["0 s", "59 s", "1 m", "1 h", "1 d"]);
  });

  test("failures are one line that says what to do", async () => {
    const cases: readonly (readonly [Promise<Ended>, RegExp])[] = [
      [ferryDead("show", "01GONE"), /dead show: there is no dead letter 01GONE; ferry dead list shows them/],
      [ferryDead("replay", "01GONE"), /dead replay: there is no dead letter 01GONE/],
      [ferryDead("purge", "01GONE", "--yes"), /dead purge: there is no dead letter 01GONE/],
      [ferryDead("show", "01BROKEN"), /answered 500: disk full/],
      [run(bin, ["dead", "list", "-c", config], { TOKEN: "wrong" }), /refused the token; check admin\.token/],
      [
        ferry("dead", "list", "--admin", "http://127.0.0.1:1"),
        /dead list: admin listener http:\/\/127\.0\.0\.1:1 (?:refused the connection; is ferry serve running\?|cannot be)/,
      ],
    ];
    for (const [ended, expected] of cases) {
      const { code, out, err } = await ended;
      assert.deepEqual([code, out], [1, ""]);
      assert.match(err, expected);
      assert.match(err, /^[^\n]+\n$/);
      assert.doesNotMatch(err, /the-token|wrong/);
    }
  });
});

describe("bin/ferry", () => {
  test("works through links and from any folder", async () => {
    symlinkSync(bin, join(folder, "link"));
    symlinkSync("link", join(folder, "link to link"));
    const { code, out } = await run(join(folder, "link to link"), ["version"]);
    assert.equal(code, 0);
    assert.match(out, /^ferry /);
  });

  test("without the pinned Node it takes one from PATH, if that is recent enough", async () => {
    const root = join(folder, "checkout with blanks");
    mkdirSync(join(root, "bin"), { recursive: true });
    mkdirSync(join(root, "path"));
    mkdirSync(join(root, "src"));
    writeFileSync(join(root, "src", "cli.ts"), "");
    copyFileSync(bin, join(root, "bin", "ferry"));
    const withNode = (version: string) => {
      const body = `#!/bin/sh\nif [ "$1" = -p ]; then echo ${version}; else echo "ran $*"; fi\n`;
      writeFileSync(join(root, "path", "node"), body, { mode: 0o755 });
      return run(join(root, "bin", "ferry"), ["a b"], { PATH: `${join(root, "path")}:/usr/bin:/bin` });
    };
    for (const version of ["24.12.0", "26.10.0", "100.0.0"]) {
      const { code, out } = await withNode(version);
      assert.deepEqual([code, out], [0, `ran ${root}/src/cli.ts a b\n`]);
    }
    for (const version of ["20.19.2", "24.11.9", "v9", "''"]) {
      const { code, out, err } = await withNode(version);
      assert.deepEqual([code, out], [1, ""]);
      assert.match(err, /^ferry: needs Node 24\.12 or newer \(found: .*\); run npm ci in .*\n$/);
    }
    // A package has no sources.
    rmSync(join(root, "src"), { recursive: true });
    assert.equal((await withNode("26.10.0")).out, `ran ${root}/dist/cli.js a b\n`);
    assert.match((await withNode("20.19.2")).err, /\); install a newer Node\n$/);
  });
});
