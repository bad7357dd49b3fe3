/** `ferry serve`: first around a Ferry made of plain functions, then the real one as a child process. */
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { createServer, type AddressInfo } from "node:net";
import { createInterface } from "node:readline";
import { describe, test } from "node:test";
import type { Alarm } from "../../src/app/clock.ts";
import { Failure, type Console } from "../../src/cli/command.ts";
import { runServe, type Served, type ServeParts, type StopSignal } from "../../src/cli/serve.ts";
import { demoConfig } from "../../src/app/config/load.ts";
import type { Role } from "../../src/app/config/config.ts";
import { explainStart, portHolder } from "../../src/app/port-holder.ts";
import { bin, ferry, file } from "./cli-child.ts";

/** A world where time stands still until `ring`, and signals come when the test says so. */
function world(
  options: {
    people?: boolean;
    served?: Partial<Served>;
    startFails?: Error;
    role?: Role;
    keys?: boolean;
    pretty?: boolean;
  } = {},
) {
  const said: string[] = [];
  const raised: StopSignal[] = [];
  const roles: Role[] = [];
  const calls: string[] = [];
  const alarms: { at: number; ring: () => void }[] = [];
  const listeners = new Map<StopSignal, (() => void)[]>();
  const ready = Promise.withResolvers<void>();
  let press: (key: string) => void = () => assert.fail("nobody listens to keys");
  const draining = Promise.withResolvers<string[]>();
  const console: Console = {
    out: () => assert.fail("serve has no results"),
    err: (text) => {
      said.push(text);
      if (text.includes("FERRY v") || text.includes('"ready"')) ready.resolve();
      if (text.includes("draining")) draining.resolve([...calls]);
    },
    env: { NO_COLOR: "1" },
    outIsTTY: false,
    errIsTTY: options.people ?? false,
    ...(options.keys === true && {
      keys: async (pressed: (key: string) => void) => {
        press = pressed;
        return () => void calls.push("restore");
      },
    }),
  };
  const served: Served = {
    apiUrl: "http://127.0.0.1:8080",
    adminUrl: "http://127.0.0.1:8081",
    tally: () => ({ requests: 3, batches: 1, tasks: 3, calls: 1, lost: 0, queued: 0, running: 0 }),
    drain: async () => void calls.push("drain"),
    stop: async () => void calls.push("stop"),
    ...options.served,
  };
  const parts: ServeParts = {
    start: async (_config, _clock, role, log) => {
      roles.push(role);
      log('{"level":"info","time":"2026-01-05T10:00:00.000Z","msg":"hello","n":1}\n');
      if (options.startFails !== undefined) throw options.startFails;
      return served;
    },
    clock: {
      now: () => 1000,
      wall: () => 1000,
      at: (at, ring): Alarm => {
        alarms.push({ at, ring });
        return { cancel: () => void alarms.splice(0) };
      },
    },
    signals: {
      on: (signal, listener) => listeners.set(signal, [...(listeners.get(signal) ?? []), listener]),
      off: (signal, listener) =>
        listeners.set(
          signal,
          (listeners.get(signal) ?? []).filter((each) => each !== listener),
        ),
      raise: (signal) => void raised.push(signal),
    },
    uptimeMs: () => 42,
    openPage: () => {},
  };
  const send = (signal: StopSignal) => listeners.get(signal)?.forEach((listener) => listener());
  const wishes = { role: options.role ?? ("all" as const), noColor: false, pretty: options.pretty ?? false };
  const code = runServe(demoConfig(), [], console, parts, wishes);
  return {
    said,
    raised,
    roles,
    calls,
    alarms,
    send,
    press: (key: string) => press(key),
    code,
    ready: ready.promise,
    draining: draining.promise,
  };
}

describe("around a Ferry", () => {
  test("people get a banner, a drain line and a farewell", async () => {
    const { said, send, code, ready, calls, alarms } = world({ people: true });
    await ready;
    send("SIGINT");
    assert.equal(await code, 0);
    assert.deepEqual(calls, ["drain", "stop"]);
    assert.deepEqual(alarms, []);
    const [nothing, line, banner, drain, farewell] = said;
    assert.equal(nothing, "");
    assert.match(line!, /^\d\d:\d\d:\d\d\.000 INFO {2}hello {2}n=1\n$/);
    assert.match(banner!, /ready in .*42.* ms/);
    assert.match(drain!, /^ {2}draining: 0 requests, 0 batches, at most 15 s \(Ctrl-C again/);
    assert.match(
      farewell!,
      /^ {2}served 3 requests in 1 batch \(3\.0 of 64 full\), 2 GPU calls saved, 0 lost\n$/,
    );
  });

  test("draining is said once it is so: the port is closed for whoever reads the line", async () => {
    const { send, code, ready, draining } = world();
    await ready;
    send("SIGTERM");
    assert.deepEqual(await draining, ["drain"]);
    assert.equal(await code, 0);
  });

  test("the terminal is given back before it drains, whoever asks for it", async () => {
    for (const ask of ["q", "\u0003", "SIGTERM"] as const) {
      const { said, press, send, code, ready, calls } = world({ people: true, keys: true });
      await ready;
      assert.match(said[2]!, /press l for load, h for keys/);
      press("h");
      assert.match(said.at(-1)!, /drain and stop/);
      if (ask === "SIGTERM") send(ask);
      else press(ask);
      assert.equal(await code, 0);
      assert.deepEqual(calls, ["restore", "drain", "stop"]);
      assert.match(said.at(-1)!, /0 lost/);
    }
  });

  test("programs get one JSON line a fact", async () => {
    const { said, send, code, ready } = world();
    await ready;
    send("SIGTERM");
    assert.equal(await code, 0);
    const facts = said.map((line) => JSON.parse(line) as { msg: string });
    assert.deepEqual(
      facts.map(({ msg }) => msg),
      ["hello", "ready", "draining", "stopped"],
    );
  });

  test("--pretty gives programs what people get, without colour", async () => {
    const { said, send, code, ready } = world({ pretty: true });
    await ready;
    send("SIGTERM");
    assert.equal(await code, 0);
    assert.match(said[1]!, /INFO {2}hello {2}n=1\n$/);
    assert.match(said[2]!, /FERRY v/);
    assert.ok(!said.join("").includes("\u001b"));
  });

  test("the role reaches Ferry, the ready line and the farewell", async () => {
    const { said, roles, send, code, ready } = world({
      people: true,
      role: "batcher",
      served: { apiUrl: "", durability: "replica" },
    });
    await ready;
    send("SIGINT");
    assert.equal(await code, 0);
    assert.deepEqual(roles, ["batcher"]);
    assert.match(said[2]!, /^ {2}FERRY v\S+ batcher {2}ready in /);
    assert.doesNotMatch(said[2]!, /API|Try|auth: none/);
    assert.match(said.at(-1)!, /^ {2}ran 3 tasks in 1 batch /);
    const program = world({ role: "gateway", served: { durability: "local" } });
    await program.ready;
    program.send("SIGTERM");
    assert.equal(await program.code, 0);
    const facts = JSON.parse(program.said[1]!) as object;
    assert.partialDeepStrictEqual(facts, { role: "gateway", durability: "local", workers: 0 });
  });

  test("drains no longer than limits.drainMs", async () => {
    const { send, code, ready, draining, calls, alarms } = world({
      served: { drain: () => new Promise(() => {}) },
    });
    await ready;
    send("SIGTERM");
    await draining;
    assert.deepEqual(
      alarms.map(({ at }) => at),
      [16_000],
    );
    alarms[0]!.ring();
    assert.equal(await code, 0);
    assert.deepEqual(calls, ["stop"]);
  });

  test("a second signal, of either kind, ends it at once by that signal", async () => {
    const { send, ready, draining, raised } = world({ served: { drain: () => new Promise(() => {}) } });
    await ready;
    send("SIGTERM");
    await draining;
    assert.deepEqual(raised, []);
    send("SIGINT");
    assert.deepEqual(raised, ["SIGINT"]);
    // Nobody listens any more, so that the raised signal kills.
    send("SIGINT");
    assert.deepEqual(raised, ["SIGINT"]);
  });

  test("a failed start is one line", async () => {
    const message = "model a: python3 is not on PATH; set backend.python";
    await assert.rejects(world({ startFails: new Error(message) }).code, new Failure(message));
    const taken = Object.assign(new Error("listen EADDRINUSE"), { code: "EADDRINUSE", port: 8081 });
    await assert.rejects(
      world({ startFails: taken }).code,
      /^Error: admin\.listen 127\.0\.0\.1:8081: already in use/,
    );
    const inside = new Error("cannot listen", {
      cause: Object.assign(new Error("x"), { code: "EACCES", port: 8080 }),
    });
    await assert.rejects(world({ startFails: inside }).code, /listen 127\.0\.0\.1:8080: ports below 1024/);
  });
});

describe("as a child process", () => {
  const config = () =>
    file(
      "serve.yaml",
      "listen: 127.0.0.1:0\nadmin: { listen: 127.0.0.1:0 }\nmodels: [{ name: a, backend: { kind: simulated, baseMs: 1 } }]\n",
    );

  /** Resolves with the JSON line that says `msg`. */
  async function line(lines: AsyncIterator<string>, msg: string): Promise<Record<string, unknown>> {
    for (;;) {
      const { value, done } = await lines.next();
      assert.ok(done !== true, `ended before it said ${msg}`);
      const fact = JSON.parse(value) as Record<string, unknown>;
      if (fact["msg"] === msg) return fact;
    }
  }

  for (const signal of ["SIGTERM", "SIGINT"] as const) {
    test(`says ready, answers, and ends well on ${signal}`, async (t) => {
      const child = spawn(bin, ["serve", "-c", config()], { stdio: ["ignore", "pipe", "pipe"] });
      t.after(() => child.kill("SIGKILL"));
      const ended = once(child, "exit");
      const lines = createInterface({ input: child.stderr })[Symbol.asyncIterator]();
      const ready = await line(lines, "ready");
      assert.partialDeepStrictEqual(ready, { level: "info", engine: "memory", workers: 1, demo: true });
      const body = JSON.stringify({ input: "hello" });
      const headers = { "content-type": "application/json" };
      const answer = await fetch(`${String(ready["listen"])}/v1/inference`, {
        method: "POST",
        headers,
        body,
      });
      assert.equal(answer.status, 200);
      await answer.text();
      child.kill(signal);
      await line(lines, "draining");
      assert.partialDeepStrictEqual(await line(lines, "stopped"), { requests: 1, batches: 1, lost: 0 });
      assert.deepEqual(await ended, [0, null]);
    });
  }

  test("a second signal ends it at once, by that signal", async (t) => {
    const path = file(
      "slow.yaml",
      `listen: 127.0.0.1:0
admin: { listen: 127.0.0.1:0 }
models:
  - { name: a, backend: { kind: simulated, baseMs: 60000 }, timeouts: { workerMs: 3500000, totalMs: 3600000 } }
limits: { drainMs: 3600000 }
telemetry: { logLevel: debug }
`,
    );
    const child = spawn(bin, ["serve", "-c", path], { stdio: ["ignore", "ignore", "pipe"] });
    t.after(() => child.kill("SIGKILL"));
    const ended = once(child, "exit");
    const lines = createInterface({ input: child.stderr })[Symbol.asyncIterator]();
    const ready = await line(lines, "ready");
    const headers = { "content-type": "application/json" };
    const cut = assert.rejects(
      fetch(`${String(ready["listen"])}/v1/inference`, { method: "POST", headers, body: '{"input":"x"}' }),
    );
    await line(lines, "batch started");
    child.kill("SIGTERM");
    assert.partialDeepStrictEqual(await line(lines, "draining"), { requests: 1, batches: 1 });
    child.kill("SIGINT");
    assert.deepEqual(await ended, [null, "SIGINT"]);
    await cut;
  });

  test("a port in use names who has it", async () => {
    const holder = createServer();
    holder.listen(0, "127.0.0.1");
    await once(holder, "listening");
    const { port } = holder.address() as AddressInfo;
    const path = file(
      "taken.yaml",
      `listen: 127.0.0.1:${port}\nadmin: { listen: 127.0.0.1:0 }\nmodels: [{ name: a, backend: { kind: simulated } }]\n`,
    );
    const { code, out, err } = await ferry("serve", "-c", path);
    holder.close();
    assert.deepEqual([code, out], [1, ""]);
    const by = process.platform === "linux" ? ` by pid ${process.pid} \\(node\\)` : "";
    assert.match(
      err,
      new RegExp(`listen 127\\.0\\.0\\.1:${port}: already in use${by}; stop it or change listen`),
    );
  });
});

test("a connection that fails is not taken for a listener", () => {
  const facts = { code: "EADDRNOTAVAIL", port: 8081, syscall: "connect" };
  const cause = Object.assign(new Error("connect EADDRNOTAVAIL 10.0.0.1:8081"), facts);
  const error = new Error("redis 10.0.0.1:8081 is not reachable", { cause });
  assert.equal(explainStart(error, demoConfig()), "redis 10.0.0.1:8081 is not reachable");
  assert.match(explainStart(cause, demoConfig()), /^connect EADDRNOTAVAIL/);
});

test("the holder of a port is found on Linux", { skip: process.platform !== "linux" }, async () => {
  const server = createServer();
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as AddressInfo;
  assert.deepEqual(portHolder(port), { pid: process.pid, command: "node" });
  server.close();
  await once(server, "close");
  assert.equal(portHolder(port), undefined);
});
