/** `ferry plan`, run here with short simulations. */
import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, describe, test } from "node:test";
import "../../fixtures/unhooked.ts";
import { CPU_US, TARGET_SHARE } from "../../../src/app/processes/fitting.ts";
import { plan } from "../../../src/cli/plan.ts";
import { poisson } from "../../../src/cli/plan/workload.ts";
import { StubWorker } from "../../e2e/stub-worker.ts";
import { call } from "./console.ts";

const folder = mkdtempSync(join(tmpdir(), "ferry-plan-"));
after(() => rmSync(folder, { recursive: true }));
const file = (name: string): string => join(folder, name);
const ASK = "--rate 3000 --slo p99=150ms --service 100ms --batch 64 --duration 6s";

interface Row {
  readonly workers: number;
  readonly load: number;
  readonly p50_ms: number;
  readonly p99_ms: number;
  readonly refused: number;
  readonly fill: number;
  readonly batches_per_thousand: number;
  readonly meets_slo: boolean;
  readonly if_one_dies: Row | null;
  readonly cost_per_million?: number;
}

interface Planned {
  readonly serve: {
    readonly processes: number;
    readonly share: number;
    readonly target_share: number;
    readonly cpu_us: typeof CPU_US;
  };
  readonly workers: number;
  readonly knee: number | null;
  readonly bound_ms: number;
  readonly rows: readonly Row[];
  readonly policies: readonly (Row & { readonly policy: string })[];
  readonly tiers: readonly (Row & { readonly name: string })[];
}

async function json<T>(line: string | readonly string[]): Promise<T> {
  const { code, out, err } = await call(plan, line);
  assert.equal(code, 0, err);
  return JSON.parse(out) as T;
}

describe("how many workers", () => {
  test("3,000 a second, 100 ms, batches of 64: seven; the table says why", async () => {
    const { code, out, err } = await call(plan, `${ASK} --cost 2.50/h`);
    assert.equal(code, 0);
    assert.match(err, /run 1: 7 workers/);
    assert.match(out, /➜ 7 +67 % .*fewest with load ≤ 0\.70/);
    assert.match(out, / 5 +9\d % .*sheds .*the knee/);
    assert.match(out, /per million/);
    assert.match(out, /policy at 7: latency p99 11\d, .* adaptive p99 1\d\d, .* eco p99 1\d\d/);
    assert.match(out, /bound for any policy: p99 ≥ 114/);
    assert.match(out, /assumes Poisson arrivals \(--burst 2\.5\)/);
  });

  test("the same seed says the same, word by word; JSON says what the table says", async () => {
    const short = "--rate 300 --slo p99=150ms --service 100ms --batch 64 --duration 2s";
    assert.equal((await call(plan, short)).out, (await call(plan, short)).out);
    const found = await json<Planned>(`${ASK} --json`);
    assert.deepEqual([found.workers, found.knee], [7, 5]);
    const chosen = found.rows.find(({ workers }) => workers === 7)!;
    assert.ok(chosen.meets_slo && chosen.load <= 0.7 && chosen.if_one_dies!.meets_slo);
    assert.ok(chosen.p99_ms >= found.bound_ms && chosen.p99_ms <= 1.07 * found.bound_ms, `${chosen.p99_ms}`);
    const [latency, adaptive, eco] = found.policies;
    assert.ok(latency!.p99_ms <= adaptive!.p99_ms && adaptive!.p99_ms <= eco!.p99_ms);
    assert.ok(latency!.batches_per_thousand > adaptive!.batches_per_thousand);
    assert.ok(adaptive!.batches_per_thousand > eco!.batches_per_thousand);
    const p99s = found.rows.map(({ p99_ms }) => p99_ms);
    assert.deepEqual(
      p99s,
      p99s.toSorted((a, b) => b - a),
      "more workers are never slower here",
    );
  });

  test("what is recommended holds with other arrivals, and more callers never need fewer workers", async () => {
    let last = 0;
    for (const rate of [400, 900, 2000]) {
      const ask = `--rate ${rate} --slo p99=150ms --service 60+0.5n --batch 32 --duration 6s --json`;
      const { workers } = await json<Planned>(ask);
      assert.ok(workers >= last, `${rate}/s: ${workers} < ${last}`);
      last = workers;
      const { rows } = await json<Planned>(`${ask} --workers ${workers} --seed 77`);
      const again = rows.find((row) => row.workers === workers)!;
      assert.ok(again.meets_slo, `${rate}/s on ${workers}: p99 ${again.p99_ms}`);
    }
  });

  test("tiers: under overload the best is served, the last is refused", async () => {
    const ask = "--rate 2000 --slo p99=150ms --service 100ms --batch 32 --workers 4 --duration 8s --json";
    const { tiers } = await json<Planned>(`${ask} --tiers enterprise=10,paid=30,free=60 --queue-ms 500`);
    assert.deepEqual(
      tiers.map(({ name }) => name),
      ["enterprise", "paid", "free"],
    );
    assert.equal(tiers[0]!.refused, 0);
    assert.ok(tiers[2]!.refused > 0.4, `free refused ${tiers[2]!.refused}`);
    const { out } = await call(plan, `${ask.replace(" --json", "")} --tiers a=1,b=1`);
    assert.match(out, /tiers at 4 +of all/);
  });

  test("crowds need more; the config's settings count; a chart is drawn", async () => {
    const config = file("ferry.yaml");
    writeFileSync(
      config,
      "models: [{ name: m, backend: { kind: simulated, workers: 3, baseMs: 80 }, maxBatchSize: 16, policy: latency }]\n",
    );
    const ask = ["-c", config, "--rate", "600", "--slo", "p95=200ms", "--duration", "10s"];
    const { code, out } = await call(plan, [...ask, "--svg", file("plan.svg")]);
    assert.equal(code, 0);
    assert.match(out, /policy latency, batches of up to 16/);
    const svg = readFileSync(file("plan.svg"), "utf8");
    for (const part of ["<svg", "prefers-color-scheme: dark", "goal p95 ≤ 200 ms", "recommended", "p99"]) {
      assert.ok(svg.includes(part), part);
    }
    assert.doesNotMatch(svg, /NaN|undefined|Infinity/);
    const calm = await json<Planned>([...ask, "--json"]);
    const crowded = await json<Planned>([...ask, "--json", "--burst", "3"]);
    assert.ok(crowded.workers > calm.workers, `${crowded.workers} > ${calm.workers}`);
  });
});

describe("--lengths", () => {
  const ask = "--rate 600 --slo p99=300ms --service 20+0.2n+0.02nl --batch 32 --duration 8s";

  test("what grouping saves is told against order of arrival", async () => {
    const { code, out, err } = await call(plan, `${ask} --lengths mixed`);
    assert.equal(code, 0, err);
    assert.match(out, /grouped by length: \d+ workers \(\d\.\d cells .*\); in order of arrival: \d+ workers/);
    assert.match(out, /20 \+ 0\.2·n \+ 0\.02·n·l ms a batch/);
    assert.match(out, /inputs of up to 512 tokens \(--lengths mixed\)/);
    const found = await json<Planned & { in_order_of_arrival: Row }>(`${ask} --lengths mixed --json`);
    const { in_order_of_arrival: inOrder } = found;
    assert.ok(1.5 * found.workers <= inOrder.workers, `${found.workers} instead of ${inOrder.workers}`);
    const chosen = found.rows.find(({ workers }) => workers === found.workers)!;
    assert.ok(chosen.meets_slo && chosen.load <= 0.7 && chosen.p99_ms >= found.bound_ms, `${chosen.load}`);
  });

  test("with a number of workers it is told in latency; lengths: off has nothing to tell", async () => {
    const { out } = await call(plan, `${ask} --lengths 90%:8-16,10%:256 --workers 4`);
    assert.match(out, /grouped by length: p99 \d+ .*; in order of arrival: p99 \d/);
    const config = file("lengths.yaml");
    const backend = "{ kind: simulated, baseMs: 20, perItemMs: 0.2, perTokenMs: 0.02 }";
    writeFileSync(
      config,
      `models: [{ name: m, backend: ${backend}, timeouts: { workerMs: 2000 }, lengths: off }]\n`,
    );
    const off = await call(
      plan,
      `-c ${config} ${ask.replace(/--service \S+/, "--lengths chat --workers 4")}`,
    );
    assert.equal(off.code, 0, off.err);
    assert.match(off.out, /20 \+ 0\.2·n \+ 0\.02·n·l ms a batch/);
    assert.doesNotMatch(off.out, /in order of arrival/);
  });

  test("a packed model gains nothing by grouping, and inputs of equal length are a line", async () => {
    const packed = await json<Planned & { in_order_of_arrival?: Row }>(
      `${ask.replace("0.02nl", "0.02t")} --lengths mixed --json`,
    );
    assert.equal(packed.in_order_of_arrival, undefined);
    const [equal, line] = [
      await json<Planned>(`${ask} --lengths 100%:50 --json`),
      await json<Planned>(`${ask.replace("0.2n+0.02nl", "1.2n")} --json`),
    ];
    assert.equal(equal.workers, line.workers);
    assert.ok(Math.abs(equal.bound_ms / line.bound_ms - 1) < 1e-9, `${equal.bound_ms} ${line.bound_ms}`);
  });

  test("lengths of a file, drawn or as they were recorded", async () => {
    const trace = file("lengths.ndjson");
    const lines = poisson(0.4, 6000, 2).map((at, index) =>
      JSON.stringify({ ms: at, tokens: index % 10 === 0 ? 400 : 12 }),
    );
    writeFileSync(trace, `${lines.join("\n")}\n`);
    const drawn = await call(plan, `${ask} --lengths ${trace} --workers 4`);
    assert.match(drawn.out, /inputs of up to 400 tokens/);
    const replayed = await json<{ best: Row }>(
      `--replay ${trace} --service 20+0.2n+0.02nl --batch 16 --workers 4 --policy adaptive --json`,
    );
    const aloneMs = 20 + 0.2 + 0.02 * 400;
    assert.ok(replayed.best.p99_ms > aloneMs, `${replayed.best.p99_ms}`);
  });

  test("what is missing or wrong is one line", async () => {
    writeFileSync(file("no-lengths.ndjson"), '{"at":1}\n{"at":2}\n');
    const cases: [string, number, RegExp][] = [
      [ask, 2, /how long are the inputs\? .* say --lengths mixed/],
      [`${ask} --lengths long`, 2, /--lengths long is neither mixed, chat, a list/],
      [`${ask} --lengths ${file("no-lengths.ndjson")}`, 1, /holds no length; it needs one JSON a line/],
      [
        `--replay ${file("no-lengths.ndjson")} --service 20+0.02nl`,
        2,
        /how long are the inputs\? .* or a file/,
      ],
      [`${ask.replace("300ms", "24ms")} --lengths mixed`, 1, /a batch of one alone takes 29\.\d ms/],
    ];
    for (const [line, code, message] of cases) {
      const said = await call(plan, line);
      assert.equal(said.code, code, `${line}: ${said.err}`);
      assert.match(said.err, message);
    }
  });
});

describe("how many processes", () => {
  const ask = (rate: number): string =>
    `--rate ${rate} --slo p99=1s --service 1ms --batch 64 --workers 2 --duration 10ms`;
  /** The highest rate that a process with so much CPU per request is planned with. */
  const most = (us: number): number => Math.floor((1e6 * TARGET_SHARE) / us);

  test("one is enough up to its share of a core", async () => {
    const { out } = await call(plan, ask(1000));
    const percent = ((1000 * CPU_US.single) / 1e4).toFixed(0);
    assert.match(
      out,
      new RegExp(`one Ferry process is enough: ${percent} % of a core, at ${CPU_US.single} µs`),
    );
    assert.doesNotMatch(out, /--processes/);
  });

  test("beyond it gateways and a core process; beyond that more machines", async () => {
    const some = await call(plan, ask(most(CPU_US.single) + 1000));
    assert.match(some.out, /ferry serve --processes 2 on 3 cores: each gateway process \d\d % of a core/);
    const many = await call(plan, ask(most(CPU_US.core) + 1000));
    assert.match(many.out, /--processes \d on each of 2 machines with \d cores: each gateway process/);
  });

  test("JSON says the same, and crowds count with their peak", async () => {
    const { serve } = await json<Planned>(`${ask(most(CPU_US.single) / 2)} --json`);
    assert.deepEqual([serve.processes, serve.cpu_us, serve.target_share], [1, CPU_US, TARGET_SHARE]);
    assert.ok(Math.abs(serve.share - TARGET_SHARE / 2) < 0.01, `${serve.share}`);
    const crowded = await json<Planned>(`${ask(most(CPU_US.single) / 2)} --json --burst 3`);
    assert.equal(crowded.serve.processes, 2);
  });
});

test("what cannot be had is one line that says what would be needed", async () => {
  const cases: [string, number, RegExp][] = [
    ["--rate 100 --slo p99=50ms --service 100ms", 1, /impossible: a batch of one alone takes 100 ms/],
    ["--rate 0 --slo p99=150ms --service 100ms", 1, /needs no workers/],
    ["--rate 100 --slo p99=150ms --service 100ms --batch 1", 1, /nothing to batch: .* needs 15 workers/],
    ["--rate 100 --slo p99=150ms", 2, /--service 100ms, or --measure URL/],
    ["--service 100ms", 2, /needs --rate and --slo/],
    ["--rate 1 --slo p98=1s --service 1ms", 2, /--slo p98=1s is no goal/],
    ["--rate 1 --slo p99=1s --service soon", 2, /--service soon is no time/],
    ["--rate -1 --slo p99=1s --service 1ms", 2, /must be a number|needs a value/],
    ["--rate 1 --slo p99=1s --service 1ms --tiers a", 2, /--tiers a is no list/],
    ["--rate 1 --slo p99=1s --service 1ms --policy greedy", 2, /unknown policy greedy/],
    ["--rate 1 --slo p99=1s --service 1ms --cost much", 2, /--cost much is no price/],
    ["--measure gpu-1", 2, /full URL/],
  ];
  for (const [line, code, message] of cases) {
    const said = await call(plan, line).catch((error: Error) => ({ code: 2, out: "", err: error.message }));
    assert.equal(said.code, code, line);
    assert.match(said.err, message);
    assert.equal(said.out, "", line);
  }
});

test("a goal that only another policy meets is said to be so", async () => {
  const said = await call(plan, "--rate 300 --slo p99=102ms --service 100ms --duration 5s");
  assert.equal(said.code, 1);
  assert.match(said.err, /p99 of 102 ms is out of reach: with \d+ workers, .*; --policy latency meets it/);
});

describe("--replay", () => {
  const trace = file("requests.ndjson");
  const start = Date.parse("2026-01-05T10:00:00Z");
  const lines = poisson(0.8, 8000, 4).map((at, index) =>
    JSON.stringify({
      arrived_at: new Date(start + at).toISOString(),
      tier: index % 5 === 0 ? "paid" : "free",
    }),
  );
  writeFileSync(trace, `${lines.toReversed().join("\n")}\nnonsense\n`);
  const ask = `--replay ${trace} --service 100ms --batch 32`;

  test("a recorded trace: the frontier, the best for the goal, the YAML", async () => {
    const { code, out, err } = await call(plan, `${ask} --slo p99=130ms --workers 4`);
    assert.equal(code, 0, err);
    assert.match(err, /unreadable, the first in line/);
    assert.match(out, /➜ \w+ .*fewest batches that meet the goal/);
    assert.match(out, /maxBatchSize: \d+\n {4}maxWaitMs: \d+\n {4}policy: (adaptive|latency|eco)/);
    const { frontier, best } = await json<{ frontier: Row[]; best: Row }>(
      `${ask} --slo p99=130ms --workers 4 --json`,
    );
    assert.ok(best.p99_ms <= 130 && best.meets_slo);
    const [cost, wait] = [frontier.map((row) => row.batches_per_thousand), frontier.map((row) => row.p99_ms)];
    assert.deepEqual(
      cost,
      cost.toSorted((a, b) => a - b),
    );
    assert.deepEqual(
      wait,
      wait.toSorted((a, b) => b - a),
    );
  });

  test("files that cannot be replayed", async () => {
    writeFileSync(file("empty.ndjson"), "");
    writeFileSync(file("bad.ndjson"), "nonsense\n{}\n");
    const cases: [string, RegExp][] = [
      [file("empty.ndjson"), /holds 0 arrivals, too few/],
      [file("bad.ndjson"), /holds 0 arrivals, .*2 unreadable, the first in line 1/],
      [file("none.ndjson"), /there is no such file/],
    ];
    for (const [path, message] of cases) {
      const said = await call(plan, `--replay ${path} --service 100ms`);
      assert.equal(said.code, 1);
      assert.match(said.err, message);
    }
  });
});

describe("--learned", () => {
  const curve = [1, 4, 16, 32, 64, 128].map((size) => ({
    size,
    ms: Math.max(5, (5 * size) / 32),
    batches: 40,
  }));
  const at = (size: number, ms: number): object => ({ size, ms, per_second: Math.round((1000 * size) / ms) });
  const hint =
    "maxBatchSize 128 lies beyond the knee at 32: batches of 128 buy no throughput and take 15 ms longer";
  const embed = {
    name: "embed",
    max_batch_size: 128,
    curve,
    knee: { ...at(32, 5), full: at(128, 20) },
    hint,
  };
  const rare = { name: "rare", max_batch_size: 8, curve: [], knee: null, hint: null };
  const open = { ...embed, name: "open", knee: null, hint: null };
  const save = (name: string, value: unknown): string => {
    writeFileSync(file(name), typeof value === "string" ? value : JSON.stringify(value));
    return file(name);
  };
  const learned = save("workers.json", { workers: [], models: [embed, rare, open] });

  test("beyond the knee nothing is bought, and nothing is planned there", async () => {
    const { code, out, err } = await call(plan, `--learned ${learned}`);
    assert.equal(code, 0, err);
    assert.match(out, /➜ 32 +5\.0 +40 +6400/);
    assert.match(out, /5 ms for a batch of n, up to 32/);
    assert.ok(out.includes(hint));
    const told = await json<{
      learned: { knee: number };
      plan: Planned & { asked: { maxBatchSize: number } };
    }>(`--learned ${learned} --rate 2000 --slo p99=50ms --duration 2s --json`);
    assert.deepEqual([told.learned.knee, told.plan.asked.maxBatchSize], [32, 32]);
    assert.ok(told.plan.workers >= 1);
  });

  test("with --lengths the learned cost by length counts", async () => {
    const cost = { kind: "padded", base_ms: 4, per_row_ms: 0.05, per_token_ms: 0.002 };
    const path = save("cost.json", { workers: [], models: [{ ...open, cost }] });
    const { out } = await call(plan, `--learned ${path} --lengths mixed`);
    assert.match(out, /4 \+ 0\.05·n \+ 0\.002·n·l ms for a batch of n/);
    const without = await call(plan, `--learned ${path}`);
    assert.doesNotMatch(without.out, /n·l/);
    const rows = save("rows.json", { workers: [], models: [{ ...open, cost: { ...cost, kind: "rows" } }] });
    assert.doesNotMatch((await call(plan, `--learned ${rows} --lengths mixed`)).out, /n·l/);
  });

  test("without a knee all sizes count; --model and --batch choose", async () => {
    const { out } = await call(plan, `--learned ${learned} --model open --batch 64`);
    assert.match(out, /up to 64/);
    assert.match(out, /no knee up to 128/);
  });

  test("what cannot be used is told in one line", async () => {
    const cases: [line: string, message: RegExp][] = [
      [`--learned ${learned} --model rare`, /nothing is learned of model rare yet/],
      [`--learned ${file("none.json")}`, /cannot be read \(ENOENT\)/],
      [`--learned ${save("other.json", { workers: [] })}`, /is not what GET \/internal\/workers answers/],
      [`--learned ${save("text.json", "no")}`, /is not what GET/],
      [`--learned ${save("none-yet.json", { models: [] })}`, /ask a process that runs batches/],
    ];
    for (const [line, message] of cases) {
      const said = await call(plan, line);
      assert.equal(said.code, 1);
      assert.match(said.err, message);
    }
  });
});

describe("--measure", () => {
  test("a worker is timed, one batch at a time, and the YAML follows", async () => {
    await using stub = await StubWorker.listen();
    const line = `--measure ${stub.url} --batch 8 --rounds 3 --input {"text":"x"}`;
    const { code, out, err } = await call(plan, line);
    assert.equal(code, 0, err);
    assert.equal(stub.mostAtOnce, 1);
    assert.deepEqual(new Set(stub.calls.map(({ inputs }) => inputs.length)), new Set([1, 2, 4, 8]));
    assert.deepEqual(stub.calls[0]!.inputs, [{ text: "x" }]);
    assert.match(out, /batch +ms, median/);
    assert.match(out, /maxBatchSize: \d/);
    assert.ok(out.includes(`workers: ["${stub.url}"]`));
  });

  test("with --lengths it is timed at several lengths", async () => {
    await using stub = await StubWorker.listen();
    const line = `--measure ${stub.url} --batch 4 --rounds 2 --lengths 50%:4,50%:32 --input [7,8]`;
    const { code, out, err } = await call(plan, line);
    assert.equal(code, 0, err);
    assert.match(out, /batch +ms at 4 tokens +32 +one of 32 among 4/);
    const shapes = new Set(
      stub.calls.map(({ inputs }) => (inputs as number[][]).map(({ length }) => length).join(",")),
    );
    for (const shape of ["4", "32", "4,4", "32,32", "32,4", "4,4,4,4", "32,4,4,4"])
      assert.ok(shapes.has(shape));
    const wrong = await call(plan, `--measure ${stub.url} --lengths mixed --input {"text":"x"}`);
    assert.equal(wrong.code, 2);
    assert.match(wrong.err, /a text or an array of integers/);
  });

  test("with a rate and a goal it goes on to plan", async () => {
    await using stub = await StubWorker.listen();
    const line = `--measure ${stub.url} --batch 8 --rounds 3 --rate 200 --slo p99=10s --duration 3s --json`;
    const found = await json<{ measured: { knee: number; yaml: string }; plan?: Planned }>(line);
    assert.ok(found.measured.knee >= 1);
    if (found.measured.knee > 1) assert.ok(found.plan!.workers >= 1);
  });

  test("a worker that refuses is told of in one line", async () => {
    await using stub = await StubWorker.listen((answering) => answering.reply(500, "out of memory"));
    const said = await call(plan, `--measure ${stub.url} --batch 4`);
    assert.equal(said.code, 1);
    assert.match(said.err, /a batch of 1 was not answered: worker answered 500: out of memory/);
    const gone = await call(plan, "--measure http://127.0.0.1:1/infer --batch 4");
    assert.match(gone.err, /was not answered: cannot connect/);
  });
});
