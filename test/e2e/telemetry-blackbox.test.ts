/**
 * What Ferry tells about a request and about itself, held to the words of its contract and to nothing else: headers,
 * metadata, the story of a task, health, and every metric with its labels.
 */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { eventually, Ferry, Folder, runFerry, writeConfig } from "./harness.ts";
import { Gate, StubWorker, stubModel } from "./stub-worker.ts";

const REASONS = ["full", "wait", "idle", "deadline"];
const SHED_REASONS = ["rate", "capacity", "deadline", "full", "draining", "no_worker"];
const STATES = ["idle", "busy", "draining", "down"];

/** Every value in a JSON document, however deep. */
function valuesOf(value: unknown): unknown[] {
  if (typeof value !== "object" || value === null) return [value];
  return Object.values(value).flatMap(valuesOf);
}

describe("of one answer", () => {
  test("headers and metadata say which batch it rode in, how full, and how long it waited", async () => {
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [stubModel([stub])] });
    const answer = await ferry.post({ input: "alone" });
    assert.equal(answer.status, 200, answer.text);
    assert.match(answer.header("x-ferry-batch-id"), /^\S{8,}$/);
    assert.equal(answer.header("x-ferry-batch-size"), "1");
    assert.match(answer.header("x-ferry-queue-ms"), /^\d+(\.\d+)?$/);
    const { metadata } = answer.json;
    assert.equal(metadata?.["batch_size"], 1);
    assert.equal(metadata?.["model"], "stub");
    assert.equal(metadata?.["cached"], false);
    const [latency, queue] = [Number(metadata?.["latency_ms"]), Number(metadata?.["queue_ms"])];
    assert.ok(queue >= 0 && latency >= queue, answer.text);
    const again = await ferry.post({ input: "alone" });
    assert.equal(again.json.metadata?.["cached"], true);
    assert.equal(stub.calls.length, 1);
  });

  test("those that ride together have the same batch, and its size", async () => {
    const gate = new Gate();
    await using stub = await StubWorker.listen(gate.hold);
    await using ferry = await Ferry.start({ models: [stubModel([stub], { maxBatchSize: 8 })] });
    const first = ferry.post({ input: "first" });
    await stub.call(1);
    const rest = Array.from({ length: 20 }, (_, i) => ferry.post({ input: `rest ${i}` }));
    await ferry.healthy(({ queue_depth }) => queue_depth === 20);
    gate.open();
    const answers = await Promise.all([first, ...rest]);
    const batches = Map.groupBy(answers, (answer) => answer.header("x-ferry-batch-id"));
    for (const members of batches.values()) {
      for (const answer of members) {
        assert.equal(answer.status, 200, answer.text);
        assert.equal(answer.header("x-ferry-batch-size"), String(members.length));
        assert.equal(answer.json.metadata?.["batch_size"], members.length);
      }
      assert.ok(members.length <= 8);
    }
    assert.equal(batches.size, stub.calls.length);
  });

  test("x-ferry-explain: 1 adds in words why the batch left, and nobody else gets them", async () => {
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [stubModel([stub])] });
    const sentences = async (headers: Record<string, string>, input: string): Promise<unknown[]> => {
      const { metadata } = (await ferry.post({ input }, headers)).json;
      return valuesOf(metadata).filter((value) => typeof value === "string" && value.split(" ").length > 3);
    };
    assert.equal((await sentences({ "x-ferry-explain": "1" }, "a")).length, 1);
    assert.equal((await sentences({}, "b")).length, 0);
    assert.equal((await sentences({ "x-ferry-explain": "0" }, "c")).length, 0);
  });
});

describe("the story of a task", () => {
  const SECRET = "open-sesame-7f3a";

  test("tells times, attempts, batch, worker, reason and outcome, and nothing of the content", async () => {
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({
      models: [stubModel([stub], { retry: { max: 3, baseMs: 10, maxMs: 20 } })],
    });
    // The first call fails, the second answers.
    stub.behave = (call) => (stub.calls.length === 1 ? call.reply(500, "out of memory") : call.echo());
    const answer = await ferry.post({ input: SECRET });
    assert.equal(answer.status, 200, answer.text);
    const story = await ferry.admin(`/internal/requests/${answer.json.task_id}`);
    assert.equal(story.status, 200, story.text);
    const values = valuesOf(JSON.parse(story.text));
    assert.ok(values.includes(answer.json.task_id), story.text);
    assert.ok(values.includes(answer.header("x-ferry-batch-id")), story.text);
    assert.ok(values.includes("stub"), story.text);
    assert.ok(values.includes(new URL(stub.url).host), `the worker: ${story.text}`);
    assert.ok(values.includes(2), `two attempts: ${story.text}`);
    assert.ok(
      values.some((value) => REASONS.includes(String(value))),
      `a reason: ${story.text}`,
    );
    const times = values.filter((value) => /^\d{4}-\d\d-\d\dT[\d:.]+Z$/.test(String(value)));
    assert.ok(times.length >= 2, `times: ${story.text}`);
    assert.ok(!story.text.includes(SECRET), "neither input nor output");
  });

  test("tells of a task that waits, of one that was refused by the model, and of none", async () => {
    const gate = new Gate();
    await using stub = await StubWorker.listen(gate.hold);
    await using ferry = await Ferry.start({ models: [stubModel([stub])] });
    const id = await ferry.accept({ input: "held" });
    await stub.call(1);
    const running = await ferry.admin(`/internal/requests/${id}`);
    assert.equal(running.status, 200, running.text);
    assert.ok(valuesOf(JSON.parse(running.text)).includes(id));
    gate.open();
    await ferry.result(id);
    stub.behave = (call) => call.reply(422, '{"error":"too long"}');
    const refused = await ferry.post({ input: SECRET });
    assert.equal(refused.status, 422, refused.text);
    const story = await ferry.admin(`/internal/requests/${refused.json.request_id}`);
    assert.equal(story.status, 200, story.text);
    assert.ok(valuesOf(JSON.parse(story.text)).includes("INPUT_REJECTED"), story.text);
    assert.ok(!story.text.includes(SECRET));
    assert.equal((await ferry.admin("/internal/requests/nobody")).status, 404);
  });
});

test("/internal/health: status, utilisation as a share, depth, rate", async () => {
  const gate = new Gate();
  await using stub = await StubWorker.listen(gate.hold);
  await using ferry = await Ferry.start({ models: [stubModel([stub], { maxBatchSize: 1 })] });
  const idle = await ferry.health();
  assert.equal(typeof idle.status, "string");
  assert.deepEqual([idle.gpu_utilization, idle.queue_depth, idle.requests_per_second], [0, 0, 0]);
  const answers = Array.from({ length: 5 }, (_, i) => ferry.post({ input: i }));
  await stub.call(1);
  const busy = await ferry.healthy(({ queue_depth }) => queue_depth === 4);
  assert.ok(busy.gpu_utilization > 0 && busy.gpu_utilization <= 1, String(busy.gpu_utilization));
  gate.open();
  await Promise.all(answers);
  await ferry.healthy(({ requests_per_second, queue_depth }) => requests_per_second > 0 && queue_depth === 0);
});

interface Sample {
  readonly name: string;
  readonly labels: Readonly<Record<string, string>>;
  readonly value: number;
}

/** The text format of Prometheus, as far as it is needed. */
function parseMetrics(text: string): { samples: Sample[]; types: Map<string, string> } {
  const types = new Map([...text.matchAll(/^# TYPE (\S+) (\S+)$/gm)].map((found) => [found[1]!, found[2]!]));
  const samples = [...text.matchAll(/^([a-z_]+)(?:\{(.*)\})? (\S+)$/gm)].map(([, name, inside, value]) => ({
    name: name!,
    labels: Object.fromEntries(
      [...(inside ?? "").matchAll(/(\w+)="([^"]*)"/g)].map((pair) => [pair[1]!, pair[2]!]),
    ),
    value: Number(value),
  }));
  return { samples, types };
}

/** Name → type and labels, beside `le`. */
const CONTRACT: Readonly<Record<string, readonly [type: string, ...labels: string[]]>> = {
  ferry_requests_total: ["counter", "code", "model", "tier"],
  ferry_request_seconds: ["histogram", "model", "tier"],
  ferry_queue_seconds: ["histogram", "model", "tier"],
  ferry_queue_depth: ["gauge", "model", "tier"],
  ferry_batch_size: ["histogram", "model"],
  ferry_batches_total: ["counter", "model", "reason"],
  ferry_worker_seconds: ["histogram", "model"],
  ferry_workers: ["gauge", "model", "state"],
  ferry_worker_utilization: ["gauge", "model"],
  ferry_load: ["gauge", "model"],
  ferry_desired_workers: ["gauge", "model"],
  ferry_arrivals_total: ["counter", "model", "tier"],
  ferry_shed_total: ["counter", "reason", "tier"],
  ferry_retries_total: ["counter"],
  ferry_dead_letters_total: ["counter"],
  ferry_cache_total: ["counter", "result"],
  ferry_collapsed_total: ["counter"],
  ferry_lost_total: ["counter"],
  ferry_padding_ratio: ["gauge", "model"],
};

describe("/metrics", () => {
  const USER = "tenant-of-the-test";
  const SECRET = "open-sesame-91bc";

  /** A Ferry with one user who may send a few requests a minute, and its key. */
  async function guarded(folder: Folder, stub: StubWorker, perMinute: number) {
    const config = {
      models: [stubModel([stub], { maxBatchSize: 4 })],
      auth: { mode: "required", keysFile: "./keys.json" },
      limits: { perUserPerMinute: perMinute, drainMs: 1000 },
    };
    const file = await writeConfig(folder, config);
    const made = await runFerry(["keys", "create", "--user", USER, "--tier", "paid", "-c", file]);
    assert.equal(made.code, 0, made.stderr);
    const headers = { authorization: `Bearer ${made.stdout.trim()}` };
    return { ferry: await Ferry.start(config, folder), headers };
  }

  test("has every metric of the contract with its labels, true to what happened", async () => {
    await using folder = await Folder.make();
    await using stub = await StubWorker.listen();
    const { ferry: started, headers } = await guarded(folder, stub, 8);
    await using ferry = started;
    const gate = new Gate();
    for (let i = 0; i < 4; i++)
      assert.equal((await ferry.post({ input: `${SECRET} ${i}` }, headers)).status, 200);
    assert.equal((await ferry.post({ input: `${SECRET} 0` }, headers)).json.metadata?.["cached"], true);
    stub.behave = gate.hold;
    const twins = [ferry.post({ input: "twin" }, headers)];
    await stub.call(5);
    twins.push(ferry.post({ input: "twin" }, headers));
    const scrape = async () => parseMetrics((await ferry.admin("/metrics")).text);
    const value = async (name: string, labels: Sample["labels"] = {}): Promise<number> =>
      (await scrape()).samples
        .filter((each) => each.name === name)
        .filter((each) => Object.entries(labels).every(([label, text]) => each.labels[label] === text))
        .reduce((sum, each) => sum + each.value, 0);
    await eventually(async () => (await value("ferry_collapsed_total")) === 1);
    assert.equal(await value("ferry_workers", { model: "stub", state: "busy" }), 1);
    gate.open();
    for (const twin of await Promise.all(twins)) assert.equal(twin.status, 200, twin.text);
    stub.behave = (call) => call.reply(422, "no");
    assert.equal((await ferry.post({ input: `${SECRET} bad` }, headers)).status, 422);
    const refused = await ferry.post({ input: "one too many" }, headers);
    assert.equal(refused.status, 429, refused.text);
    assert.equal((await ferry.post({ input: "who?" })).status, 401);

    const paid = { model: "stub", tier: "paid" };
    await eventually(async () => (await value("ferry_requests_total")) === 10);
    assert.equal(await value("ferry_requests_total", { ...paid, code: "200" }), 7);
    assert.equal(await value("ferry_requests_total", { ...paid, code: "422" }), 1);
    assert.equal(await value("ferry_requests_total", { code: "429" }), 1);
    assert.equal(await value("ferry_requests_total", { model: "", code: "401" }), 1);
    assert.equal(await value("ferry_shed_total", { tier: "paid", reason: "rate" }), 1);
    assert.equal(await value("ferry_batches_total", { model: "stub" }), 6);
    assert.equal(await value("ferry_batch_size_count", { model: "stub" }), 6);
    assert.equal(await value("ferry_batch_size_sum", { model: "stub" }), 6);
    assert.equal(await value("ferry_lost_total"), 0);
    assert.equal(await value("ferry_queue_depth"), 0);
    assert.ok((await value("ferry_queue_seconds_count", paid)) >= 6);
    assert.ok((await value("ferry_request_seconds_count", paid)) >= 7);
    await checkContract(ferry);
  });

  async function checkContract(ferry: Ferry): Promise<void> {
    const { text } = await ferry.admin("/metrics");
    const { samples, types } = parseMetrics(text);
    for (const [name, [type, ...labels]] of Object.entries(CONTRACT)) {
      assert.equal(types.get(name), type, name);
      const members = type === "histogram" ? [`${name}_bucket`, `${name}_sum`, `${name}_count`] : [name];
      const own = samples.filter((sample) => members.includes(sample.name));
      assert.ok(own.length > 0, `${name} is not there`);
      for (const sample of own) {
        const found = Object.keys(sample.labels).filter((label) => label !== "le");
        assert.deepEqual(found.sort(), labels, sample.name);
      }
    }
    const labelled = (label: string): Set<string> =>
      new Set(samples.filter(({ name }) => name.startsWith("ferry_")).map(({ labels }) => labels[label]!));
    const within = (label: string, known: readonly (string | undefined)[]): void =>
      assert.deepEqual(
        [...labelled(label)].filter((each) => !known.includes(each)),
        [],
        label,
      );
    within("reason", [...REASONS, ...SHED_REASONS, undefined]);
    within("state", [...STATES, undefined]);
    within("model", ["stub", "", undefined]);
    within("tier", ["enterprise", "paid", "free", "", undefined]);
    const edges = samples
      .filter(({ name }) => name === "ferry_batch_size_bucket")
      .map(({ labels }) => labels["le"]);
    for (const edge of ["1", "2", "4", "+Inf"])
      assert.ok(edges.includes(edge), `${edges.join(" ")}: ${edge}`);
    assert.equal(edges.at(-2), "4", "the last edge is the largest batch");
    assert.ok(samples.some(({ name }) => name.startsWith("process_") || name.startsWith("nodejs_")));
    for (const secret of [USER, SECRET, "Bearer"]) assert.ok(!text.includes(secret), secret);
  }

  test("asks for the token where there is one; the probes do not", async () => {
    await using stub = await StubWorker.listen();
    const token = "a-token-of-the-test";
    await using ferry = await Ferry.start({
      models: [stubModel([stub])],
      admin: { listen: "127.0.0.1:0", token },
    });
    assert.equal((await ferry.admin("/metrics")).status, 401);
    assert.equal((await ferry.admin("/metrics", "GET", { authorization: "Bearer wrong" })).status, 401);
    const answer = await ferry.admin("/metrics", "GET", { authorization: `Bearer ${token}` });
    assert.equal(answer.status, 200);
    assert.match(answer.header("content-type"), /^text\/plain/);
    assert.equal((await ferry.admin("/healthz")).status, 200);
    assert.equal((await ferry.admin("/readyz")).status, 200);
    assert.ok(!answer.text.includes(token));
  });
});
