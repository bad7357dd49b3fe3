/** `ferry bench` on recorded numbers: goals, requests, metrics, the result, and two results side by side. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { Account } from "../../../src/cli/bench/account.ts";
import { compare, differences } from "../../../src/cli/bench/compare.ts";
import type { ClientState } from "../../../src/cli/bench/driver.ts";
import { serverSide } from "../../../src/cli/bench/exposition.ts";
import { Histogram } from "../../../src/cli/bench/histogram.ts";
import {
  type Finished,
  type Result,
  parseResult,
  resultOf,
  sureness,
} from "../../../src/cli/bench/results.ts";
import { parseBodies, Requests } from "../../../src/cli/bench/requests.ts";
import { judge, parseDuration, parseSlo, type Slo } from "../../../src/cli/bench/slo.ts";
import { renderComparison, renderMarkdown, renderResult } from "../../../src/cli/bench-report.ts";
import { paint } from "../../../src/cli/terminal/terminal.ts";

const plain = paint(false);

function goal(text: string): Slo {
  const slo = parseSlo(text);
  assert.ok(typeof slo !== "string", text);
  return slo;
}

function mistake(text: string): string {
  const slo = parseSlo(text);
  assert.ok(typeof slo === "string", text);
  return slo;
}

describe("goals", () => {
  const run = {
    offered: 1000,
    refused: 20,
    errors: 1,
    servedPerSecond: 979,
    meanMs: 50,
    percentileMs: (p: number) => p,
  };

  test("durations have a unit", () => {
    assert.deepEqual(["150ms", "30s", "1.5m", "250us"].map(parseDuration), [150, 30_000, 90_000, 0.25]);
    for (const text of ["150", "ms", "-1s", "1 s", "1d", ""])
      assert.equal(parseDuration(text), undefined, text);
  });

  test("each kind is judged by its own figure", () => {
    const met = ["p99=99ms", "p99.9=1s", "max=100ms", "mean=50ms", "errors=1", "errors=0.1%", "refused=2%"];
    for (const text of [...met, "refused=20", "rate=979"]) assert.ok(judge(goal(text), run).met, text);
    const missed = [
      "p99=98ms",
      "max=99ms",
      "mean=49.9ms",
      "errors=0",
      "errors=0.09%",
      "refused=1.9%",
      "rate=980",
    ];
    for (const text of missed) assert.ok(!judge(goal(text), run).met, text);
  });

  test("what is no goal is said", () => {
    assert.match(mistake("p98=1s"), /not one of p50, p90/);
    assert.match(mistake("p99=150"), /needs a duration, like p99=150ms/);
    assert.match(mistake("errors=few"), /a count or a share/);
    assert.match(mistake("rate=5%"), /requests a second/);
    assert.match(mistake("p99"), /needs a duration/);
  });

  test("what was not measured meets nothing", () => {
    const nothing = { ...run, percentileMs: () => NaN, servedPerSecond: 0 };
    assert.deepEqual(
      [judge(goal("p99=1s"), nothing).met, judge(goal("p99=1s"), nothing).measured],
      [false, null],
    );
  });
});

describe("requests", () => {
  const options = {
    authority: "h:1",
    path: "/v1/inference",
    bytes: 0,
    repeat: false,
    headers: [{}, { a: "b" }],
  };
  const parts = (text: string): { head: string; body: string } => {
    const cut = text.indexOf("\r\n\r\n");
    return { head: text.slice(0, cut), body: text.slice(cut + 4) };
  };
  const lengthOf = (head: string): number => Number(/content-length: (\d+)/.exec(head)![1]);

  test("a text gets a marker behind it, and its length is right", () => {
    for (const input of ["hello", "", 'größer 😀 "x"']) {
      for (const bytes of [0, 10, 500]) {
        const bodies = [{ input, fields: { model: "m" } }];
        const requests = new Requests({ ...options, bodies, bytes });
        const { head, body } = parts(requests.next(1));
        assert.match(head, /^POST \/v1\/inference HTTP\/1\.1\r\nhost: h:1\r\na: b\r\n/);
        assert.equal(lengthOf(head), body.length);
        const value = JSON.parse(body) as { input: string; model: string };
        assert.equal(value.model, "m");
        assert.ok(value.input.startsWith(input) && value.input.endsWith(requests.marker), value.input);
        if (bytes === 500) assert.equal(body.length, 500);
        assert.match(body, /^[\x20-\x7e]*$/);
        assert.notEqual(parts(requests.next(1)).body, body);
      }
    }
  });

  test("other inputs, and repeated ones, go as they are", () => {
    const bodies = [
      { input: [1, 2], fields: {} },
      { input: "a", fields: { parameters: { x: 1 } } },
    ];
    const requests = new Requests({ ...options, bodies, repeat: true });
    assert.ok(!requests.isUnique);
    const texts = [0, 1, 2].map(() => parts(requests.next(0)));
    assert.deepEqual(
      texts.map(({ body }) => body),
      ['{"input":[1,2]}', '{"input":"a","parameters":{"x":1}}', '{"input":[1,2]}'],
    );
    for (const { head, body } of texts) assert.equal(lengthOf(head), body.length);
  });

  test("a file has a value or a body a line", () => {
    const bodies = parseBodies('"a"\n\n{"input":[1],"model":"m"}\n{"x":1}\n');
    assert.deepEqual(bodies, [
      { input: "a", fields: {} },
      { input: [1], fields: { model: "m" } },
      { input: { x: 1 }, fields: {} },
    ]);
    assert.throws(() => parseBodies('"a"\nb\n'), /line 2 is no JSON/);
    assert.throws(() => parseBodies("\n"), /empty/);
  });
});

function exposition(scale: number): string {
  const at = (count: number): number => count * scale;
  return [
    "# HELP ferry_batch_size x",
    ...[1, 16, 32, 48, 63, 64].map(
      (le) =>
        `ferry_batch_size_bucket{le="${le}",model="m"} ${at({ 1: 0, 16: 1, 32: 2, 48: 5, 63: 8, 64: 10 }[le]!)}`,
    ),
    `ferry_batch_size_bucket{le="+Inf",model="m"} ${at(10)}`,
    `ferry_batch_size_sum{model="m"} ${at(480)}`,
    `ferry_batch_size_count{model="m"} ${at(10)} # {trace_id="x"} 1`,
    `ferry_batch_size_count{model="other"} ${at(1000)}`,
    `ferry_batches_total{model="m",reason="full"} ${at(2)}`,
    `ferry_batches_total{model="m",reason="idle"} ${at(8)}`,
    `ferry_worker_seconds_sum{model="m"} ${at(1)}`,
    `ferry_worker_seconds_count{model="m"} ${at(10)}`,
    'ferry_workers{model="m",state="idle"} 1',
    'ferry_workers{model="m",state="busy"} 1',
    'ferry_workers{model="m",state="down"} 5',
    "ferry_lost_total 0",
  ].join("\n");
}

test("what the server did is the difference of two looks, summed over processes", () => {
  const side = serverSide(
    { at: 0, texts: [exposition(1), exposition(2)] },
    { at: 2000, texts: [exposition(2), exposition(3)] },
    "m",
  );
  assert.deepEqual([side.batches, side.tasks, side.maxBatchSize, side.workers], [20, 960, 64, 4]);
  assert.deepEqual(side.reasons, { full: 4, idle: 16 });
  assert.deepEqual(side.sizes, [
    { from: 1, to: 16, batches: 2 },
    { from: 17, to: 32, batches: 2 },
    { from: 33, to: 48, batches: 6 },
    { from: 49, to: 63, batches: 6 },
    { from: 64, to: 64, batches: 4 },
  ]);
  assert.equal(side.workerMs, 100);
  // 2 s of 8 worker-seconds busy, 48 of 64 seats taken.
  assert.deepEqual([side.filled, side.empty, side.idle], [0.1875, 0.0625, 0.75]);
});

function finished(ms: (i: number) => number, more: Partial<Finished> = {}): Finished {
  const account = new Account(["all"], 10_000);
  account.begin(0);
  const head = "HTTP/1.1 200 OK\r\nx-ferry-batch-size: 8\r\nx-ferry-queue-ms: 5.5\r\n\r\n";
  for (let i = 0; i < 10_000; i++) {
    account.offer(0);
    account.answered(0, 200, i, i + ms(i), head, '"metadata":{"latency_ms":30.5,"cached":false}}');
  }
  const client: ClientState = {
    cpuShare: 0.2,
    late: 10,
    lag: new Histogram(),
    loop: new Histogram(),
    connections: 12,
    waited: 0,
  };
  return {
    account,
    client,
    seconds: 10,
    interrupted: false,
    server: undefined,
    serverMissing: "admin listener http://127.0.0.1:8081 refused the connection",
    slos: [goal("p99=150ms"), goal("errors=0")],
    about: {
      startedAt: "2026-01-05T10:00:00.000Z",
      environment: { node: "v26", cpu: "x", cores: 2 },
      command: "ferry bench --rate 1000",
      target: { url: "http://127.0.0.1:8080/v1/inference", model: null },
      uniqueInputs: true,
      load: {
        kind: "open",
        rate: 1000,
        callers: null,
        arrivals: "poisson",
        warmupSeconds: 2,
        timeoutMs: 10_000,
        connections: 4096,
      },
    },
    ...more,
  };
}

const noisy = (i: number): number => 40 + (i % 100) / 10;

describe("the result", () => {
  test("has goals first, the counts, and where the time went", () => {
    const text = renderResult(resultOf(finished(noisy)), plain);
    assert.match(
      text,
      /^ {2}http:.*open loop, 1,000 req\/s \(poisson\).*10 s after 2 s of warm-up\n {2}✓ p99 49\.\d ms ≤ 150 ms {4}✓ errors 0\n/,
    );
    assert.match(text, /offered 10,000 {2}served 10,000 {2}refused 0 {2}failed 0 {2}lost 0/);
    assert.match(text, /mean ms +45\.0 = queue 5\.5 \+ worker and gateway 25\.0 \+ network 14\.5\n/);
    assert.match(
      text,
      /batches +fill 8\.0, as the answers tell; more is not known: admin listener .* refused/,
    );
    assert.match(text, /late sends 0\.1 %/);
    assert.doesNotMatch(text, /bottleneck/);
  });

  test("with the server's own figures", () => {
    const server = serverSide({ at: 0, texts: [exposition(1)] }, { at: 2000, texts: [exposition(3)] }, "m");
    const text = renderResult(
      resultOf(finished((i) => 90 + noisy(i), { server, serverMissing: undefined })),
      plain,
    );
    assert.match(text, /= queue 5\.5 \+ worker 100\.0 \+ gateway and network 29\.[45]\n/);
    assert.match(
      text,
      /batches +20, 10\.0\/s, fill 48\.0\/64 +full \S+ 20 % +idle \S+ 80 % +wait 0 % +deadline 0 %/,
    );
    assert.match(text, /fill +1-16 \S+ 10 % +17-32 /);
    assert.match(text, /GPU time +filled seats 38 % +empty seats 13 % +idle 50 %/);
  });

  test("says in plain words when the client was the bottleneck, and whose fault it was", () => {
    const { client, ...rest } = finished(noisy);
    const busy = renderResult(resultOf({ ...rest, client: { ...client, cpuShare: 0.97 } }), plain);
    assert.match(
      busy,
      /client was the bottleneck: it used 97 % of a core\. These figures are the client's.*lower --rate/,
    );
    const crowded = renderResult(resultOf({ ...rest, client: { ...client, late: 500 } }), plain);
    assert.match(crowded, /it sent 5\.0 % of the requests late, though it used 20 % .*other processes/);
  });

  test("survives JSON, and becomes Markdown", () => {
    const result = resultOf(finished(noisy));
    assert.deepEqual(parseResult(JSON.stringify(result)), result);
    for (const text of ["", "{}", "null", "[1]", '{"format":"ferry bench 1"}'])
      assert.equal(parseResult(text), undefined);
    assert.match(renderMarkdown(result), /\| ✓ goal \| p99 49\.\d ms ≤ 150 ms \|/);
  });

  test("a run in which nothing was served has no latencies, and says so", () => {
    const account = new Account(["all"], 1000);
    account.offer(0);
    account.silent(0, "timeout");
    const result = resultOf({ ...finished(noisy), account });
    assert.equal(result.latencyMs.p99, null);
    assert.deepEqual(result.codes, { timeout: 1 });
    assert.match(renderResult(result, plain), /✗ p99 not measured for 150 ms/);
  });
});

describe("two results", () => {
  const verdicts = (a: Result, b: Result) =>
    Object.fromEntries(compare(a, b).map((row) => [row.name, row.verdict]));

  test("intervals come from the scatter of blocks, or from order statistics", () => {
    const block = (...ms: number[]): Histogram => {
      const histogram = new Histogram();
      for (const each of ms) for (let i = 0; i < 500; i++) histogram.record(each);
      return histogram;
    };
    const wholeOf = (blocks: readonly Histogram[]): Histogram => {
      const whole = new Histogram();
      for (const each of blocks) whole.merge(each);
      return whole;
    };
    const alike = Array.from({ length: 10 }, () => block(10, 20));
    const calm = sureness(wholeOf(alike), alike);
    assert.equal(calm.method, "blocks");
    assert.ok(calm.of["p50"]!.high - calm.of["p50"]!.low < 0.1);
    // A stall in one block of ten: another run might have had none, or two.
    const stalled = [...alike.slice(1), block(10, 500)];
    const unsure = sureness(wholeOf(stalled), stalled);
    assert.ok(unsure.of["p99"]!.low < 21 && unsure.of["p99"]!.high > 490);
    assert.ok(unsure.of["mean"]!.low < 16 && unsure.of["mean"]!.high > 60);
    const few = new Histogram();
    for (let i = 1; i <= 100; i++) few.record(i);
    const ranks = sureness(few, [few]);
    assert.equal(ranks.method, "order statistics");
    assert.ok(Math.abs(ranks.of["p50"]!.low - 40) < 2 && Math.abs(ranks.of["p50"]!.high - 61) < 2);
  });

  test("the same load twice is within noise, a slower one is worse", () => {
    const jitter = (added: number) => (i: number) => noisy(i) + added + (Math.floor(i / 1000) % 5) / 2;
    const [a, b, slow] = [jitter(0), jitter(0.3), (i: number) => 20 + noisy(i)].map((ms) =>
      resultOf(finished(ms)),
    );
    const calm = verdicts(a!, b!);
    assert.equal(calm["p50"], "within noise");
    assert.equal(calm["p99"], "within noise");
    assert.equal(calm["lost"], "same");
    assert.equal(verdicts(a!, slow!)["p99"], "worse");
    assert.equal(verdicts(slow!, a!)["p99"], "better");
    const text = renderComparison(
      { name: "a.json", result: a! },
      { name: "b.json", result: slow! },
      plain,
      false,
    );
    assert.match(text, /p99 ms +5\d\.\d +69\.\d +▲ \d+\.\d % +worse/);
    assert.match(text, /within noise: the 95 % intervals overlap \(drawn again and again from 10 blocks/);
  });

  test("what makes them hard to compare is said", () => {
    const [a, b] = [resultOf(finished(noisy)), resultOf(finished(noisy))];
    assert.deepEqual(differences(a, b), []);
    assert.deepEqual(differences(a, { ...b, load: { ...b.load, rate: 500 } }), ["rate: 1000 and 500"]);
  });
});
