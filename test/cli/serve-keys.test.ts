/** The keys of `ferry serve`: on a terminal made of plain functions, and against a real Ferry in this process. */
import assert from "node:assert/strict";
import { EventEmitter } from "node:events";
import { describe, test } from "node:test";
import { SystemClock } from "../../src/app/clock.ts";
import { killLine, loadLine, ServeKeys, streamsOf, type ServeKeyParts } from "../../src/cli/serve-keys.ts";
import { demoConfig, parseConfig } from "../../src/app/config/load.ts";
import type { Config } from "../../src/app/config/config.ts";
import { startFerry } from "../../src/app/ferry.ts";
import { listenToKeys, type TerminalProcess } from "../../src/cli/terminal/keyboard.ts";

function configOf(text: string): Config {
  const { config, problems } = parseConfig(text, "ferry.yaml", {});
  assert.deepEqual(problems, undefined);
  return config;
}

/** A process on a terminal that writes down what is done to it. */
class FakeProcess extends EventEmitter implements TerminalProcess {
  readonly pid = 7;
  readonly done: string[] = [];
  readonly stdin = Object.assign(new EventEmitter(), {
    setRawMode: (raw: boolean) => void this.done.push(raw ? "raw" : "cooked"),
    setEncoding: () => {},
    resume: () => void this.done.push("resume"),
    pause: () => void this.done.push("pause"),
  });

  kill(pid: number, signal: NodeJS.Signals): void {
    this.done.push(`kill ${pid} ${signal}`);
  }
}

describe("the terminal", () => {
  test("hands on single keys in raw mode, and is as before at the end", () => {
    const process = new FakeProcess();
    const pressed: string[] = [];
    const stop = listenToKeys(
      process,
      (key) => pressed.push(key),
      () => true,
    );
    assert.deepEqual(process.done, ["raw", "resume"]);
    process.stdin.emit("data", "lk");
    process.stdin.emit("data", "\u0003");
    process.stdin.emit("data", "\u001b[A"); // an arrow is no "a"
    assert.deepEqual(pressed, ["l", "k", "\u0003"]);
    stop!();
    stop!();
    assert.deepEqual(process.done.splice(2), ["pause", "cooked"]);
    process.stdin.emit("data", "l");
    assert.equal(pressed.length, 3);
    for (const name of process.eventNames()) assert.equal(process.listenerCount(name), 0, String(name));
  });

  test("is given back when the process ends by itself or by a signal", () => {
    for (const end of ["exit", "SIGHUP", "SIGQUIT"]) {
      const process = new FakeProcess();
      listenToKeys(
        process,
        () => {},
        () => true,
      );
      process.emit(end);
      const killed = end === "exit" ? [] : [`kill 7 ${end}`];
      assert.deepEqual(process.done.slice(2), ["pause", "cooked", ...killed]);
    }
    const process = new FakeProcess();
    listenToKeys(
      process,
      () => {},
      () => true,
    );
    process.stdin.emit("data", "\u001c");
    assert.deepEqual(process.done.slice(2), ["pause", "cooked", "kill 7 SIGQUIT"]);
  });

  test("Ctrl-Z gives it back, and it is taken again once we are in front", () => {
    const process = new FakeProcess();
    let inFront = true;
    listenToKeys(
      process,
      () => {},
      () => inFront,
    );
    process.stdin.emit("data", "\u001a");
    assert.deepEqual(process.done.splice(0), ["raw", "resume", "pause", "cooked", "kill 0 SIGTSTP"]);
    inFront = false;
    process.emit("SIGCONT"); // `bg`
    assert.deepEqual(process.done, []);
    inFront = true;
    process.emit("SIGCONT"); // `fg`
    assert.deepEqual(process.done, ["raw", "resume"]);
  });

  test("is not touched from the background", () => {
    const process = new FakeProcess();
    assert.equal(
      listenToKeys(
        process,
        () => assert.fail("no key"),
        () => false,
      ),
      undefined,
    );
    assert.deepEqual([process.done, process.stdin.eventNames()], [[], []]);
  });
});

/** Keys with everything around them written down. */
function keysWith(changes: Partial<ServeKeyParts> = {}) {
  const said: string[] = [];
  const calls: string[] = [];
  const parts: ServeKeyParts = {
    config: demoConfig(),
    apiUrl: "http://127.0.0.1:1",
    adminUrl: "http://0.0.0.0:8081",
    demo: { kill: () => undefined },
    clock: new SystemClock(),
    say: (line) => void said.push(line),
    open: (url) => void calls.push(`open ${url}`),
    quit: () => void calls.push("quit"),
    ...changes,
  };
  const keys = new ServeKeys(parts);
  const press = (text: string): string => {
    said.length = 0;
    for (const key of text) keys.press(key);
    return said.join("\n");
  };
  return { keys, press, calls };
}

describe("what keys do", () => {
  test("h tells which there are", () => {
    assert.match(keysWith().press("h"), /^ {2}h .*\n {2}o .*8081\/\n {2}l .*\n {2}k .*\n {2}q /);
    assert.match(keysWith({ demo: undefined }).press("H"), /^ {2}h .*\n {2}o .*\n {2}q [^\n]*$/);
  });

  test("o shows the dashboard, and keeps the token out of the command line", () => {
    const config = configOf(
      "admin: { token: sesame-sesame-16 }\nmodels: [{ name: a, backend: { kind: simulated } }]",
    );
    const { press, calls } = keysWith({ config });
    assert.equal(press("o"), "  dashboard: http://127.0.0.1:8081/#token=sesame-sesame-16");
    assert.deepEqual(calls, ["open http://127.0.0.1:8081/"]);
    const off = configOf(
      "telemetry: { dashboard: false }\nmodels: [{ name: a, backend: { kind: simulated } }]",
    );
    assert.match(keysWith({ config: off }).press("o"), /telemetry\.dashboard is false/);
  });

  test("q and Ctrl-C drain, once; the second Ctrl-C is the terminal's again", () => {
    const { press, calls } = keysWith();
    press("qq\u0003l");
    assert.deepEqual(calls, ["quit"]);
    const other = keysWith();
    other.press("\u0003");
    assert.deepEqual(other.calls, ["quit"]);
  });

  test("l and k do nothing where no worker is simulated; other keys never", () => {
    const { press, calls } = keysWith({ demo: undefined });
    assert.equal(press("lkxyz1\t"), "");
    assert.deepEqual(calls, []);
  });

  test("l says what it needs", () => {
    const closed = configOf(
      "auth: { mode: required, keysFile: ./k }\nmodels: [{ name: a, backend: { kind: simulated } }]",
    );
    assert.match(keysWith({ config: closed }).press("l"), /needs auth: \{ mode: none \}/);
  });

  test("k says who died and what that means", () => {
    const killed = { worker: "gpu-2", model: "a", inFlight: 57, left: 3, workers: 4 };
    assert.equal(
      keysWith({ demo: { kill: () => killed } }).press("k"),
      "  gpu-2 killed for 6 s with 57 tasks in its hands; 3 of 4 are left to do the work, nobody's answer is lost",
    );
    assert.match(
      killLine({ ...killed, left: 0, inFlight: 0 }, true),
      /^ {2}gpu-2 of a killed .*nobody is left/,
    );
    assert.match(keysWith().press("k"), /nobody is left to kill/);
  });

  test("the load keeps to what the workers can do, and to what one process can send", () => {
    const simulated = (name: string, more: string) =>
      `{ name: ${name}, maxBatchSize: 10, backend: { kind: simulated, ${more} } }`;
    const model = (...models: string[]) => streamsOf(configOf(`models: [${models.join(", ")}]`));
    assert.deepEqual(model(simulated("a", "workers: 2, baseMs: 100")), [{ model: "a", perSecond: 140 }]);
    assert.deepEqual(model(simulated("a", "baseMs: 0")), [{ model: "a", perSecond: 2500 }]);
    const [fast, slow] = model(simulated("a", "workers: 64, baseMs: 1"), simulated("b", "baseMs: 100"));
    assert.ok(Math.abs(fast!.perSecond + slow!.perSecond - 2500) < 1e-6);
    assert.ok(fast!.perSecond > 100 * slow!.perSecond);
  });

  test("the end of a load is one line", () => {
    const counts = { sent: 21_480, answered: 21_470, refused: 9, failed: 1, leftOut: 0, seconds: 12.04 };
    assert.equal(
      loadLine(counts),
      "  load off: 21,480 requests in 12 s, 21,470 answered, 9 refused, 1 failed",
    );
    assert.match(loadLine({ ...counts, leftOut: 5 }), /, 5 never sent: too many were on their way$/);
  });
});

describe("a Ferry that is hurt", () => {
  const text = `
listen: 127.0.0.1:0
admin: { listen: 127.0.0.1:0 }
models: [{ name: a, maxBatchSize: 8, backend: { kind: simulated, workers: 4, baseMs: 40 } }]
telemetry: { logLevel: silent }
`;

  test("answers everybody while its workers die one after the other", async () => {
    const config = configOf(text);
    await using ferry = await startFerry(config);
    const { apiUrl, adminUrl, demo } = ferry;
    const lines: string[] = [];
    const off = Promise.withResolvers<string>();
    const say = (line: string): void => {
      lines.push(line);
      if (line.includes("load off")) off.resolve(line);
    };
    const { keys } = keysWith({ config, apiUrl, adminUrl, demo, say });
    using _load = { [Symbol.dispose]: () => keys.end() };
    keys.press("l");
    assert.match(lines[0]!, /^ {2}load on: about 560 requests a second, press l to stop$/);
    await ferry.events.next("task.cached");
    await ferry.events.next("task.joined");
    const died = ferry.events.next("worker.changed", ({ state }) => state === "down");
    await ferry.events.next("batch.started");
    keys.press("k");
    const { worker } = await died;
    assert.match(
      lines[1]!,
      new RegExp(`^ {2}${worker} killed for 6 s with \\d+ tasks? in .*; 3 of 4 are left`),
    );
    await ferry.events.next("batch.settled");
    for (const key of "kkkk") keys.press(key);
    assert.match(lines.slice(2).join("\n"), /2 of 4 .*\n.* 1 of 4 .*\n.*nobody is left: .*\n.*left to kill/);
    // They come back by themselves, and do what had to wait.
    await ferry.events.next("worker.changed", ({ state }) => state !== "down");
    keys.press("l");
    const [, sent, answered] = /: ([\d,]+) requests.* ([\d,]+) answered/.exec(await off.promise)!;
    assert.ok(Number(sent!.replace(",", "")) > 100, await off.promise);
    assert.ok(answered!.length > 0);
    assert.equal(ferry.tally().lost, 0);
  });
});
