/** /metrics of a whole Ferry: scraped by a real Prometheus, bounded whatever clients send, and documented. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import type { Dispatcher } from "undici";
import { request } from "undici";
import { claims, pem, rsaPair, token } from "../gateway/admission/stage.ts";
import { promtool } from "../deploy/promtool.ts";
import { namesOf, samplesOf } from "../observe/stage.ts";
import { assertError, eventually, Ferry, Folder, ROOT, type Headers } from "./harness.ts";
import { Prometheus } from "./prometheus.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

const TOKEN = "the-token-of-the-admin-listener";
const bearer = (text: string): Headers => ({ authorization: `Bearer ${text}` });
const issuer = rsaPair();
const as = (sub: string, tier: string): Headers => bearer(token(issuer, claims(Date.now(), { sub, tier })));

let folder: Folder;
let stub: StubWorker;
let ferry: Ferry;
/** Takes spans and says nothing: without a collector nobody is traced. */
const collector = createServer((taken, answer) => void taken.resume().on("end", () => answer.end()));

before(async () => {
  folder = await Folder.make();
  await folder.write("jwt.pem", pem(issuer));
  stub = await StubWorker.listen((call) => {
    if (call.inputs.includes("bad")) call.reply(422, "{}");
    else call.echo();
  });
  collector.listen(0, "127.0.0.1");
  await once(collector, "listening");
  const otlpUrl = `http://127.0.0.1:${(collector.address() as AddressInfo).port}`;
  const jwt = { issuer: "https://id.example", audience: "ferry", publicKeyFile: "./jwt.pem" };
  const simulated = { kind: "simulated", workers: 1, baseMs: 1 };
  ferry = await Ferry.start(
    {
      models: [stubModel([stub]), { name: "other", backend: simulated, cache: { scope: "off" } }],
      auth: { mode: "required", jwt },
      admin: { listen: "127.0.0.1:0", token: TOKEN },
      admission: { mode: "off" },
      telemetry: { otlpUrl, sample: 0 },
      // Nobody is there: the log waits, and its counters are shown.
      requestLog: { url: "postgres://ferry@127.0.0.1:9/ferry" },
    },
    folder,
  );
});
after(async () => {
  await ferry?.[Symbol.asyncDispose]();
  await stub?.[Symbol.asyncDispose]();
  collector.closeAllConnections();
  collector.close();
  await folder?.[Symbol.asyncDispose]();
});

async function scrape(headers: Headers = {}): Promise<string> {
  const answer = await ferry.admin("/metrics", "GET", { ...bearer(TOKEN), ...headers });
  assert.equal(answer.status, 200, answer.text);
  return answer.text;
}

test("/metrics needs the admin token, and is as promtool wants it", async () => {
  assertError(await ferry.admin("/metrics"), 401, "UNAUTHENTICATED");
  const answer = await ferry.admin("/metrics", "GET", bearer(TOKEN));
  assert.equal(answer.header("content-type"), "text/plain; version=0.0.4; charset=utf-8");
  const { text } = promtool(["check", "metrics"], ROOT, answer.text);
  const ours = text.split("\n").filter((line) => line !== "" && !line.startsWith("nodejs_"));
  assert.deepEqual(ours, []);
});

test("a real Prometheus scrapes it, with what was sent, and its rules find what they need", async () => {
  await using prometheus = await Prometheus.start(ferry.adminUrl, TOKEN);
  await eventually(async () => {
    const targets = await prometheus.targets();
    assert.deepEqual(
      targets.filter(({ lastError }) => lastError !== "").map(({ lastError }) => lastError),
      [],
    );
    return targets.length === 1 && targets[0]!.health === "up";
  });
  const paid = as("somebody", "paid");
  const send = (input: unknown, headers: Headers = paid, model = "stub") =>
    ferry.post({ input, model }, headers);
  const answers = await Promise.all(Array.from({ length: 40 }, (_, n) => send(`input ${n}`)));
  assert.ok(answers.every(({ status }) => status === 200));
  for (let n = 0; n < 3; n++) assert.equal((await send("input 0")).status, 200);
  assert.equal((await send("bad")).status, 422);
  assert.equal((await send(1, paid, "nobody")).status, 400);
  assert.equal((await send(1, { ...paid, prefer: "respond-async" }, "other")).status, 202);
  assert.equal((await send(1, {})).status, 401);
  const traced = { ...paid, traceparent: `00-${"ab".repeat(16)}-${"cd".repeat(8)}-01` };
  assert.equal((await send("traced", traced)).status, 200);

  const of = (labels: string): string => `sum(ferry_requests_total{job="ferry", ${labels}})`;
  await prometheus.reaches(of('model="stub", tier="paid", code="200"'), 44);
  await prometheus.reaches(of('model="stub", tier="paid", code="422"'), 1);
  await prometheus.reaches(of('model="other", tier="paid", code="202"'), 1);
  await prometheus.reaches(of('model="", tier="paid", code="400"'), 1);
  await prometheus.reaches(of('model="", tier="", code="401"'), 1);
  // Those that waited: not the 202, nor what was refused.
  await prometheus.reaches('ferry_request_seconds_count{model="stub", tier="paid"}', 45);
  await prometheus.reaches('count(ferry_request_seconds_count{model="other"}) or vector(0)', 0);
  await prometheus.reaches('ferry_cache_total{result="hit"}', 3);
  await prometheus.reaches('ferry_cache_total{result="miss"}', 42);
  await prometheus.reaches('ferry_arrivals_total{model="stub", tier="paid"}', 42);
  await prometheus.reaches('ferry_batch_size_sum{model="stub"}', 42);
  await prometheus.reaches("sum(ferry_lost_total)", 0);
  await prometheus.reaches('sum(ferry_workers{model="stub", state=~"idle|busy"})', 1);
  assert.ok((await prometheus.value("process_cpu_seconds_total"))! > 0);
  assert.ok((await prometheus.value("nodejs_eventloop_lag_p99_seconds"))! > 0);

  await eventually(async () => {
    return (await prometheus.exemplars("ferry_request_seconds_bucket")).includes("ab".repeat(16));
  });
  await eventually(async () => (await prometheus.rules()).every(({ health }) => health === "ok"));
  await prometheus.reaches('job_model:ferry_workers_serving:sum{model="stub"}', 1);
  const firing = await prometheus.query('ALERTS{alertstate="firing"}');
  assert.deepEqual(
    firing.map(({ metric }) => metric["alertname"]),
    [],
  );
});

describe("labels", () => {
  const random = (): string => Math.random().toString(36).slice(2);
  /** What each series is: its name and labels, but for those of Node's inner life, which come by themselves. */
  const series = (text: string): string[] =>
    [...samplesOf(text).keys()].filter((name) => !/_gc_|^nodejs_active_/.test(name));

  /** One request of a kind, with names that were never seen before. */
  async function strange(n: number): Promise<void> {
    const tier = ["enterprise", "paid", "free"][n % 3]!;
    const who = as(`tenant-${random()}`, tier);
    if (n % 5 === 0) await ferry.post({ input: 1, model: `model-${random()}` }, who);
    else if (n % 5 === 1) await ferry.get(`/path-${random()}`, who);
    else if (n % 5 === 2) await ferry.post({ input: 1, model: "stub", client_id: `client-${random()}` }, who);
    else if (n % 5 === 3) await ferry.get(`/v1/result/${random()}`, who);
    else {
      const method = ["PURGE", "PROPFIND", "LINK", "REPORT"][n % 4] as Dispatcher.HttpMethod;
      const { body } = await request(`${ferry.url}/v1/inference?${random()}`, { method, headers: who });
      await body.dump();
    }
  }

  async function storm(count: number): Promise<void> {
    for (let n = 0; n < count; n += 30) {
      await Promise.all(Array.from({ length: Math.min(30, count - n) }, (_, at) => strange(n + at)));
    }
  }

  test("31 cardinality: 500 requests with new models, tenants, paths and methods make no new series", async () => {
    await storm(60); // Every kind of request once, in every tier: what these need is there.
    const before = series(await scrape());
    await storm(500);
    const text = await scrape();
    assert.deepEqual(
      series(text).filter((name) => !before.includes(name)),
      [],
    );
    assert.doesNotMatch(text, /(tenant|model|path|client)-/);
    assert.doesNotMatch(text, /(tenant|user|path|method|client)="/);
  });
});

describe("docs/metrics.md", () => {
  test("lists every metric that /metrics shows with its type and labels, and no other", async () => {
    await ferry.post({ input: "documented", model: "stub" }, as("somebody", "paid"));
    const text = await scrape();
    const docs = await readFile(join(ROOT, "docs/metrics.md"), "utf8");
    const rows = [...docs.matchAll(/^\| `(ferry_\w+)(?:\{([\w,]+)\})?` \| (\w+) \|/gm)];
    const listed = rows.map(([, name, labels, type]) => `${type} ${name} ${labels ?? ""}`);
    const shown = namesOf(text)
      .filter((name) => name.startsWith("ferry_"))
      .map((name) => {
        const type = new RegExp(`^# TYPE ${name} (\\w+)`, "m").exec(text)![1]!;
        const line = new RegExp(`^${name}(?:_bucket)?(?:\\{(.*?)\\})? `, "m").exec(text);
        const labels = (line?.[1] ?? "").matchAll(/(\w+)="/g);
        const names = [...labels].map(([, label]) => label!).filter((label) => label !== "le");
        const ordered = ["model", "tier", "code"].filter((label) => names.includes(label));
        const rest = names.filter((label) => !ordered.includes(label));
        return `${type} ${name} ${[...ordered, ...rest].join(",")}`;
      });
    assert.deepEqual(listed.sort(), shown.sort());
    const mentioned = new Set(docs.match(/\bferry_[a-z_]+/g));
    const known = new Set(namesOf(text).flatMap((name) => [name, ...parts(name)]));
    assert.deepEqual(
      [...mentioned].filter((name) => !known.has(name)),
      [],
    );
  });

  function parts(name: string): string[] {
    return [`${name}_bucket`, `${name}_sum`, `${name}_count`];
  }
});

test("telemetry.metrics: false, and nothing is at /metrics", async () => {
  await using quiet = await Ferry.start({ models: [stubModel([stub])], telemetry: { metrics: false } });
  assertError(await quiet.admin("/metrics"), 404, "NOT_FOUND");
});
