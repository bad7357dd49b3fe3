/** `ferry serve` on a real terminal (pty.py): keys, load, a worker that dies, and the mode left behind. */
import assert from "node:assert/strict";
import { spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { join } from "node:path";
import { test } from "node:test";
import { eventually, Folder, type Health, ROOT, writeConfig } from "./harness.ts";

const FERRY = join(ROOT, "bin/ferry");
const PTY = join(import.meta.dirname, "pty.py");
const PATIENCE_MS = 60_000;
const CTRL_C = "\u0003";

interface End {
  readonly code: number;
  readonly was_raw: boolean;
  readonly restored: boolean;
}

class Terminal implements AsyncDisposable {
  readonly #child: ChildProcess;
  readonly #closed: Promise<unknown>;
  #shown = "";
  #said = "";

  constructor(command: readonly string[], env: NodeJS.ProcessEnv = {}) {
    const { CI: _, ...rest } = process.env;
    this.#child = spawn("python3", [PTY, ...command], {
      env: { ...rest, NO_COLOR: "1", ...env },
      stdio: "pipe",
    });
    this.#closed = once(this.#child, "close");
    this.#child.stdout!.setEncoding("utf8").on("data", (text: string) => (this.#shown += text));
    this.#child.stderr!.setEncoding("utf8").on("data", (text: string) => (this.#said += text));
  }

  type(keys: string): void {
    this.#child.stdin!.write(keys);
  }

  async sees(text: RegExp): Promise<RegExpExecArray> {
    await eventually(() => text.test(this.#shown) || this.#child.exitCode !== null, PATIENCE_MS).catch(
      () => {},
    );
    const found = text.exec(this.#shown);
    assert.ok(found !== null, `never saw ${text.source}:\n${this.#shown}\n${this.#said}`);
    return found;
  }

  async end(): Promise<End> {
    await this.#closed;
    return JSON.parse(this.#said.trim().split("\n").at(-1)!) as End;
  }

  async adminUrl(): Promise<string> {
    return (await this.sees(/Dashboard {2}(http:\S+?)\/\r?\n/))[1]!;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#child.stdin!.end();
    await this.#closed;
  }
}

async function totals(adminUrl: string): Promise<Health["totals"]> {
  const response = await fetch(`${adminUrl}/internal/health`);
  return ((await response.json()) as Health).totals;
}

const gpus = { kind: "simulated", workers: 6, baseMs: 100 };
const config = {
  models: [{ name: "a", maxBatchSize: 8, backend: gpus }],
  telemetry: { logLevel: "silent" },
  limits: { drainMs: 60_000 },
};

test("l loads, k kills a worker, nobody's answer is lost, q leaves the terminal as it was", async () => {
  await using folder = await Folder.make();
  await using terminal = new Terminal([FERRY, "serve", "-c", await writeConfig(folder, config)]);
  const adminUrl = await terminal.adminUrl();
  await terminal.sees(/press l for load, h for keys/);
  terminal.type("h");
  await terminal.sees(/ {2}k {2}kill a worker/);
  terminal.type("l");
  await terminal.sees(/load on: about 336 requests a second, press l to stop/);
  await eventually(async () => (await totals(adminUrl)).tasks > 300, PATIENCE_MS);
  terminal.type("k");
  await terminal.sees(/gpu-\d killed for 6 s .*; 5 of 6 are left/);
  await eventually(async () => (await totals(adminUrl)).retried > 0, PATIENCE_MS);
  const { tasks } = await totals(adminUrl);
  await eventually(async () => (await totals(adminUrl)).tasks > tasks + 300, PATIENCE_MS);
  terminal.type("l");
  // On a machine that is short of CPU some may be refused; whoever is let in is answered.
  await terminal.sees(/load off: [\d,]+ requests in \d+ s, [\d,]+ answered, [\d,]+ refused, 0 failed\r?\n/);
  terminal.type("lq");
  await terminal.sees(/draining: /);
  await terminal.sees(/served [\d,]+ requests in [\d,]+ batches .*, 0 lost/);
  assert.deepEqual(await terminal.end(), { code: 0, was_raw: true, restored: true });
});

test("Ctrl-C drains although the terminal is raw, and the second one kills", async () => {
  await using folder = await Folder.make();
  const slow = {
    ...config,
    models: [
      {
        name: "a",
        backend: { kind: "simulated", baseMs: 60_000 },
        timeouts: { workerMs: 3_500_000, totalMs: 3_600_000 },
      },
    ],
    limits: { drainMs: 3_600_000 },
  };
  await using terminal = new Terminal([FERRY, "serve", "-c", await writeConfig(folder, slow)]);
  const [, url] = await terminal.sees(/API {8}(http:\S+)/);
  const adminUrl = await terminal.adminUrl();
  const body = JSON.stringify({ input: "x" });
  const cut = assert.rejects(
    fetch(url!, { method: "POST", headers: { "content-type": "application/json" }, body }),
  );
  await eventually(async () => {
    const health = await fetch(`${adminUrl}/internal/health`);
    return ((await health.json()) as Health).running === 1;
  }, PATIENCE_MS);
  terminal.type(CTRL_C);
  await terminal.sees(/draining: 1 request, 1 batch, .*Ctrl-C again/);
  terminal.type(CTRL_C);
  // Ended by SIGINT, as Python writes it.
  assert.deepEqual(await terminal.end(), { code: -2, was_raw: true, restored: true });
  await cut;
});

test("a CI has no keys, and Ctrl-C is the terminal's own", async () => {
  await using folder = await Folder.make();
  const command = [FERRY, "serve", "-c", await writeConfig(folder, config)];
  await using terminal = new Terminal(command, { CI: "true" });
  const [banner] = await terminal.sees(/FERRY[^]*anonymous".*\r?\n/);
  assert.doesNotMatch(banner, /press/);
  terminal.type("l");
  terminal.type(CTRL_C);
  await terminal.sees(/served 0 requests .*, 0 lost/);
  assert.deepEqual(await terminal.end(), { code: 0, was_raw: false, restored: true });
});

test("in the background of a shell it goes on working and leaves the terminal alone", async () => {
  await using folder = await Folder.make();
  const file = await writeConfig(folder, config);
  const script = 'set -m; "$0" serve -c "$1" & read line; kill -TERM $!; wait $!';
  await using terminal = new Terminal(["sh", "-c", script, FERRY, file]);
  const adminUrl = await terminal.adminUrl();
  await eventually(async () => (await totals(adminUrl)).lost === 0, PATIENCE_MS);
  terminal.type("\n");
  await terminal.sees(/served 0 requests .*, 0 lost/);
  assert.deepEqual(await terminal.end(), { code: 0, was_raw: false, restored: true });
});
