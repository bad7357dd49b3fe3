/** `ferry bench` against a whole Ferry: what it prints, what it saves, and how it ends. */
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import type { Result } from "../../src/cli/bench/results.ts";
import { Authority } from "../fixtures/certificates.ts";
import { Ferry, Folder, freePort, ROOT, runFerry, writeConfig, type Config } from "./harness.ts";

const FAST = { kind: "simulated", workers: 4, baseMs: 20 };
const demo = (more: Config = {}): Config => ({ models: [{ name: "demo", backend: FAST }], ...more });
const LOAD = ["--rate", "150", "--duration", "1s", "--warmup", "300ms"];

/** With the addresses that a Ferry on free ports got. */
function at(ferry: Ferry, ...more: readonly string[]): string[] {
  return ["bench", ferry.url, "--admin", ferry.adminUrl, ...more];
}

function parse(stdout: string): Result {
  assert.equal(stdout.trim().split("\n").length, 1, "one object");
  return JSON.parse(stdout) as Result;
}

function assertAddsUp({ counts }: Result): void {
  const { offered, served, refused, failed, lost, unsent, pending } = counts;
  assert.equal(offered, served + refused + failed + lost + unsent + pending);
}

describe("a running Ferry", () => {
  let ferry: Ferry;
  let folder: Folder;
  before(async () => {
    [ferry, folder] = [await Ferry.start(demo()), await Folder.make()];
  });
  after(async () => {
    await ferry[Symbol.asyncDispose]();
    await folder[Symbol.asyncDispose]();
  });

  test("goals that are met: exit 0, a report on stdout, and the run is saved", async () => {
    const file = join(folder.path, "a.json");
    const goals = ["--slo", "p99=30s", "--slo", "errors=0", "--slo", "rate=1"];
    const { code, stdout, stderr } = await runFerry(at(ferry, ...LOAD, ...goals, "--save", file));
    assert.equal(code, 0, stdout + stderr);
    assert.match(stdout, /✓ p99 .* ≤ 30,000 ms {4}✓ errors 0 {4}✓ rate /);
    assert.match(stdout, /refused 0 {2}failed 0 {2}lost 0/);
    assert.match(stdout, /mean ms .* = queue .* \+ worker .* \+ gateway and network /);
    assert.match(stdout, /batches .* fill .*\/64 .*\n {2}fill .*\n {2}GPU time {4}filled seats/);
    assert.match(stdout, /each answer had its own input/);
    assert.doesNotMatch(stdout, /\u001b/);
    const saved = JSON.parse(await readFile(file, "utf8")) as Result;
    assert.ok(saved.counts.served > 0 && saved.histogram.buckets.length > 0);
    assertAddsUp(saved);
  });

  test("a missed goal: exit 1, and the JSON has everything", async () => {
    const { code, stdout } = await runFerry(at(ferry, ...LOAD, "--slo", "p50=1us", "--json"));
    assert.equal(code, 1);
    const result = parse(stdout);
    assertAddsUp(result);
    assert.equal(result.slos[0]!.met, false);
    assert.equal(result.load.rate, 150);
    assert.equal(result.codes["200"], result.counts.served);
    assert.ok(result.latencyMs.p50! >= 19 && result.latencyMs.p50! <= result.latencyMs.max!);
    assert.ok(result.server!.batches > 0 && result.server!.maxBatchSize === 64);
    assert.equal(result.verified, true);
    assert.equal(result.crossed, 0);
  });

  test("two saved runs side by side, as text and as Markdown", async () => {
    const files = ["b.json", "c.json"].map((name) => join(folder.path, name));
    for (const file of files) await runFerry(at(ferry, ...LOAD, "--arrivals", "even", "--save", file));
    const [text, markdown] = await Promise.all([
      runFerry(["bench", "--compare", ...files]),
      runFerry(["bench", "--compare", ...files, "--markdown"]),
    ]);
    assert.deepEqual([text.code, markdown.code], [0, 0], text.stderr);
    assert.match(text.stdout, /p99 ms .*\n/);
    assert.match(text.stdout, /within noise: the 95 % intervals overlap/);
    assert.match(markdown.stdout, /^\| {2}\| .*b\.json \| .*c\.json \| change \|/);
    const none = await runFerry(["bench", "--compare", ferry.configFile, files[0]!]);
    assert.equal(none.code, 1);
    assert.match(none.stderr, /^ferry: bench: .* is not what --save writes\n$/);
  });

  test("a closed loop; without an admin listener the report says what it lacks", async () => {
    const closed = ["--closed", "-c", "8", "--duration", "500ms", "--warmup", "100ms"];
    const { code, stdout, stderr } = await runFerry(["bench", ferry.url, ...closed]);
    assert.equal(code, 0, stderr);
    assert.match(stdout, /closed loop, 8 callers/);
    assert.match(stdout, /batches +fill \d.*more is not known: no admin listener was named \(--admin URL\)/);
    const away = `http://127.0.0.1:${await freePort()}`;
    const other = await runFerry(["bench", ferry.url, "--admin", away, ...closed]);
    assert.match(other.stdout, /more is not known: admin listener .* refused the connection/);
  });

  test("inputs from a file, and what the server would refuse every time", async () => {
    const file = await folder.write(
      "inputs.ndjson",
      '"one"\n[1,2,3]\n{"input":"two","parameters":{"x":1}}\n',
    );
    const { stdout } = await runFerry(at(ferry, ...LOAD, "--input", `@${file}`, "--repeat", "--json"));
    const result = parse(stdout);
    assert.ok(result.cached > 0);
    assert.equal(result.uniqueInputs, false);
    const wrong = await runFerry(at(ferry, ...LOAD, "--model", "nobody"));
    assert.equal(wrong.code, 1);
    assert.match(
      wrong.stderr,
      /^ferry: bench: http:.* answered 400 INVALID_REQUEST: model "nobody" is not served here.*\n$/,
    );
  });

  test("Ctrl-C: the report of what was measured, and death by the signal", async () => {
    const words = at(ferry, "--rate", "100", "--duration", "10m", "--warmup", "0");
    const child = spawn(join(ROOT, "bin/ferry"), words, { stdio: ["ignore", "pipe", "pipe"] });
    let stdout = "";
    child.stdout.setEncoding("utf8").on("data", (text: string) => (stdout += text));
    child.stderr.resume();
    const before = (await ferry.health()).totals.tasks;
    await ferry.healthy(({ totals }) => totals.tasks > before + 20);
    child.kill("SIGINT");
    const [code, signal] = (await once(child, "close")) as [number | null, string | null];
    assert.deepEqual([code, signal], [null, "SIGINT"]);
    assert.match(stdout, /interrupted/);
    assert.match(stdout, /offered \d+ {2}served \d+/);
  });
});

test("nobody there: exit 1, one line", async () => {
  const { code, stdout, stderr } = await runFerry(["bench", `127.0.0.1:${await freePort()}`, "--rate", "10"]);
  assert.deepEqual([code, stdout], [1, ""]);
  assert.match(
    stderr,
    /^ferry: bench: http:\/\/127\.0\.0\.1:\d+\/v1\/inference refused the connection; is ferry serve running\?\n$/,
  );
});

test("a server that is killed meanwhile: what it had is lost, the rest failed, and it ends", async () => {
  await using ferry = await Ferry.start(
    demo({ models: [{ name: "demo", backend: { ...FAST, baseMs: 500 } }] }),
  );
  const words = at(
    ferry,
    "--rate",
    "100",
    "--duration",
    "12s",
    "--warmup",
    "0",
    "--slo",
    "errors=0",
    "--json",
  );
  const ended = runFerry(words);
  await ferry.healthy(({ totals }) => totals.tasks > 50);
  await ferry.kill();
  const { code, stdout, stderr } = await ended;
  assert.equal(code, 1, stderr);
  const result = parse(stdout);
  assertAddsUp(result);
  assert.ok(result.counts.lost > 0, stdout.slice(0, 2000));
  assert.ok(result.codes["ECONNREFUSED"]! > 0);
  assert.equal(result.server, null);
});

test("tiers with their keys, over TLS, from the config", async () => {
  using authority = new Authority();
  const { certFile, keyFile } = authority.issue({ names: "DNS:elsewhere.example" });
  await using folder = await Folder.make();
  const port = await freePort();
  const config = demo({
    listen: `127.0.0.1:${port}`,
    admin: { listen: `127.0.0.1:${await freePort()}`, tls: true, token: "a-token-of-some-length-0123456789" },
    tls: { certFile, keyFile },
    auth: { mode: "required", keysFile: "./keys.json" },
  });
  const configFile = await writeConfig(folder, config);
  const tiers = ["enterprise", "free"];
  const lines: string[] = [];
  // Before Ferry starts: it would know each of them a moment later.
  for (const tier of tiers) {
    const made = await runFerry(["keys", "create", "--user", tier, "--tier", tier, "-c", configFile]);
    assert.equal(made.code, 0, made.stderr);
    lines.push(`${tier}=${made.stdout.trim()}`);
  }
  const keys = await folder.write("keys.txt", `# of this test\n${lines.join("\n")}\n`);
  await using ferry = await Ferry.start(config, folder);
  const words = ["bench", "-c", ferry.configFile, ...LOAD, "--json"];
  const done = await runFerry([...words, "--keys", keys, "--mix", "enterprise=1,free=3"]);
  assert.equal(done.code, 0, done.stderr);
  const result = parse(done.stdout);
  assertAddsUp(result);
  assert.deepEqual(
    result.tiers.map(({ name }) => name),
    tiers,
  );
  assert.ok(result.tiers.every(({ served }) => served > 0));
  assert.ok(result.server!.batches > 0);
  assert.ok(!JSON.stringify(result).includes(lines[0]!.split("=")[1]!), "no key is printed");
  const nobody = await runFerry(words);
  assert.equal(nobody.code, 1);
  assert.match(nobody.stderr, /answered 401: .*; give a key with --key or FERRY_API_KEY\n$/);
});
