/** `ferry top` without a server: what it draws at which size, what its keys do, how it ends. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { Failure } from "../../src/cli/command.ts";
import { readEvents, type StreamEvent } from "../../src/cli/event-stream.ts";
import { type TopInput, TopSession, type TopTerminal, TopView, drawTop } from "../../src/cli/top.ts";
import type {
  BatchRow,
  CostFrame,
  Frame,
  Hello,
  ModelFrame,
  WorkerRow,
} from "../../src/observe/dashboard/frames.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { paint } from "../../src/cli/terminal/terminal.ts";

const NOW = 1_700_000_000_000;
const bare = paint(false);

function worker(name: string, more: Partial<WorkerRow> = {}): WorkerRow {
  const row = {
    name,
    state: "busy" as const,
    busy: 0.81,
    filled: 0.709,
    inFlight: 56,
    ratio: 1,
    batchMs: 100,
  };
  return { ...row, zone: "", ...more };
}

const down = { why: "ECONNREFUSED", sinceMs: 4000, retryInMs: 2000 };
const workers = [
  worker("gpu-1"),
  worker("gpu-2", { ratio: 2.4, batchMs: 240 }),
  worker("gpu-3", { state: "down", down }),
];

/** F, then a gap, then I that still runs. */
const batches: BatchRow[] = [
  ["b1", "gpu-1", NOW - 1000, NOW - 600, 64, 0, 5, 1, 1, "64/0/0", "", ""],
  ["b2", "gpu-1", NOW - 500, 0, 40, 2, 5, 0, 1, "40/0/0", "", ""],
  ["b3", "gpu-2", NOW - 300, NOW - 290, 9, 3, 5, 1, 1, "9/0/0", "", ""],
];

const model = {
  verdict: {
    level: "ok",
    key: "healthy",
    advice: "",
    sentence: "Healthy. 1,804 req/s is 70 % of capacity. Nobody refused.",
  },
  recent: {
    requestsPerSecond: 1804,
    p50: 115,
    p95: 128,
    p99: 131,
    slow: null,
    meanMs: 115,
    refusedShare: 0.004,
    load: 0.7,
    capacityPerSecond: 2560,
    utilization: 0.8,
    fill: 0.88,
    desiredWorkers: 4,
  },
  queues: [
    { depth: 0, admittedPerSecond: 1 },
    { depth: 14, admittedPerSecond: 1 },
    { depth: 1041, admittedPerSecond: 1 },
  ],
  oldestWaitMs: 18,
  workers,
  batches,
  batchesLeftOut: 0,
  refusedTenants: [],
} as unknown as ModelFrame;

const frame = {
  now: NOW,
  process: { scope: "this process", deadLetters: 2, totals: { lost: 0 } },
  models: [model, { ...model, workers: [], batches: [] }],
  notes: [{ at: NOW - 5000, level: "warn", text: "gpu-3 of embed is down: \u001b[31mECONNREFUSED" }],
} as unknown as Frame;

const hello = {
  version: "1.2.3",
  demo: true,
  tiers: ["enterprise", "paid", "free"],
  reasons: ["full", "wait", "idle", "deadline"],
  models: [
    { name: "embed", maxBatchSize: 64 },
    { name: "rerank", maxBatchSize: 8 },
  ],
  frame,
} as unknown as Hello;

const event = (name: string, value: object): StreamEvent => ({ name, data: JSON.stringify(value) });

function view(): TopView {
  const made = new TopView();
  assert.ok(made.take(event("hello", hello)));
  return made;
}

function picture(of: TopView, columns: number, rows = 40): string {
  const lines = drawTop(of, { columns, rows }, bare);
  assert.ok(lines.length <= rows, `${lines.length} lines`);
  for (const line of lines) assert.ok(Array.from(line).length <= columns, line);
  return lines.map((line) => `${line.trimEnd()}\n`).join("");
}

describe("what is drawn", () => {
  test("on a wide terminal", () => {
    assert.equal(
      picture(view(), 100),
      `FERRY embed · this process · DEMO
Healthy. 1,804 req/s is 70 % of capacity. Nobody refused.

1,804 req/s   load 70 %   p50 115   p99 131 ms   refused 0.4 %   dead 2   lost 0   seats taken 88 %
enterprise ▏   0   paid ▏  14   free █ 1,041   oldest waits 18 ms

gpu-1  [······························FFFFFFFF··IIIIIIIIII]  56/64  busy  81 %   100 ms
gpu-2  [············································D·····]  56/64  busy  81 %   240 ms  2.4× slower
gpu-3  ✕ down 4,000 ms, ECONNREFUSED, next try 2,000 ms
F full  W wait  I idle  D deadline  · free

22:13:15  gpu-3 of embed is down: ·[31mECONNREFUSED
`,
    );
  });

  test("with what a batch's time follows, where that is its inputs' lengths", () => {
    const said = (cost: CostFrame): string => {
      const made = view();
      made.take(event("frame", { ...frame, models: [{ ...model, cost }, model] }));
      return (
        picture(made, 120)
          .split("\n")
          .find((line) => line.startsWith("a batch takes")) ?? ""
      );
    };
    const words = "0.5 ms + 0.46 µs a token of the padded batch";
    const cost = { kind: "padded", words, paddingRatio: 1.23, grouped: true } as const;
    assert.equal(said(cost), `a batch takes ${words}; inputs of similar length share it; padding 1.23×`);
    assert.equal(
      said({ ...cost, paddingRatio: null, grouped: false }),
      `a batch takes ${words}; inputs are not grouped by length`,
    );
    assert.doesNotMatch(picture(view(), 120), /a batch takes/);
  });

  test("on a narrow one, and on one that is hardly there", () => {
    assert.equal(
      picture(view(), 44, 16),
      `FERRY embed · this process · DEMO
Healthy. 1,804 req/s is 70 % of capacity.
Nobody refused.

1,804 req/s   load 70 %   p50 115
p99 131 ms   refused 0.4 %   dead 2   lost 0
seats taken 88 %
enterprise ▏   0   paid ▏  14   free █ 1,041
oldest waits 18 ms

gpu-1  56/64  busy  81 %   100 ms
gpu-2  56/64  busy  81 %   240 ms  2.4× slo…
gpu-3  ✕ down 4,000 ms, ECONNREFUSED, next …
F full  W wait  I idle  D deadline  · free
`,
    );
    for (const [columns, rows] of [
      [1, 1],
      [10, 3],
      [20, 8],
      [300, 5],
    ] as const)
      picture(view(), columns, rows);
  });

  test("more workers than fit are counted", () => {
    const many = view();
    const all = Array.from({ length: 40 }, (_, at) => worker(`gpu-${at}`));
    many.take(event("frame", { ...frame, models: [{ ...model, workers: all }, model] }));
    assert.match(picture(many, 100, 20), /\ngpu-0 [^]*\n\+\d+ more\n/);
  });

  test("keys: another model, one reason, pause", () => {
    const made = view();
    made.interactive = true;
    assert.match(picture(made, 120), / {2}q quit {2}m model {2}r reason {2}p pause\n/);
    made.nextReason();
    assert.match(picture(made, 120), /FFFFFFFF··----------\][^]*only full, others -/);
    for (let n = 0; n < 4; n++) made.nextReason();
    assert.doesNotMatch(picture(made, 120), /only/);
    made.paused = true;
    assert.match(picture(made, 120), /· PAUSED/);
    made.nextModel();
    assert.match(picture(made, 120), /^FERRY rerank[^]*no worker is known/);
    made.nextModel();
    assert.match(picture(made, 120), /^FERRY embed/);
  });

  test("colour says nothing that the letters do not", () => {
    const lines = drawTop(view(), { columns: 100, rows: 40 }, paint(true));
    const plain = lines.join("\n").replace(/\u001b\[\d+m/g, "");
    assert.equal(plain, drawTop(view(), { columns: 100, rows: 40 }, bare).join("\n"));
    assert.match(lines.join("\n"), /\u001b\[34mFFFFFFFF\u001b\[39m/);
  });

  test("a batch is drawn by its last row, and forgotten when it has left the picture", () => {
    const made = view();
    const later = (ms: number, rows: BatchRow[]): boolean =>
      made.take(event("frame", { ...frame, now: NOW + ms, models: [{ ...model, batches: rows }, model] }));
    assert.ok(later(100, [["b2", "gpu-1", NOW - 500, NOW, 40, 2, 5, 1, 1, "", "", ""]]));
    assert.match(picture(made, 100), /FFFFFFFF··IIIIIIIIII··\]/);
    assert.ok(later(60_000, []));
    assert.deepEqual(made.batchesOf("gpu-1"), []);
  });
});

describe("what is believed", () => {
  test("a frame that is none is not taken, and a stranger's event is passed over", () => {
    const made = new TopView();
    for (const wrong of [{}, { ...hello, frame: {} }, { ...hello, models: [] }, []]) {
      assert.ok(!made.take(event("hello", wrong)), JSON.stringify(wrong));
    }
    assert.ok(!made.take({ name: "hello", data: "<html>" }));
    assert.ok(made.take(event("tomorrow", {})));
    assert.ok(made.take(event("hello", hello)));
    assert.ok(!made.take(event("frame", { ...frame, models: [model] })));
  });

  test("events are put together from whatever pieces they come in", async () => {
    const text = ': hi\nretry: 1000\n\nevent: hello\ndata: {"a":"ä"}\n\nevent: frame\ndata: 1\ndata: 2\n\n';
    const bytes = new TextEncoder().encode(text);
    for (const size of [1, 2, 7, bytes.length]) {
      const chunks = Array.from({ length: Math.ceil(bytes.length / size) }, (_, at) =>
        bytes.subarray(at * size, (at + 1) * size),
      );
      const found: StreamEvent[] = [];
      for await (const each of readEvents(asChunks(chunks))) found.push(each);
      assert.deepEqual(found, [
        { name: "hello", data: '{"a":"ä"}' },
        { name: "frame", data: "1\n2" },
      ]);
    }
  });
});

async function* asChunks(chunks: readonly Uint8Array[]): AsyncGenerator<Uint8Array> {
  yield* chunks;
}

class FakeTerminal implements TopTerminal {
  readonly pictures: string[] = [];
  input: TopInput | undefined;
  closed = 0;

  size(): { columns: number; rows: number } {
    return { columns: 120, rows: 30 };
  }

  open(input: TopInput): void {
    this.input = input;
  }

  draw(lines: readonly string[]): void {
    this.pictures.push(lines.join("\n"));
  }

  close(): void {
    this.closed++;
  }
}

describe("a session", () => {
  /** Streams that the test writes: each call is one connection. */
  function session(...streams: (() => AsyncGenerator<StreamEvent>)[]) {
    const clock = new VirtualClock();
    const terminal = new FakeTerminal();
    const client = {
      async *live(_: unknown, stop: AbortSignal): AsyncGenerator<StreamEvent> {
        const next = streams.shift();
        if (next === undefined) await new Promise((resolve) => stop.addEventListener("abort", resolve));
        else yield* next();
      },
    };
    const ended = new TopSession({ client, clock, model: undefined }, terminal, bare).run();
    return { clock, terminal, ended };
  }

  async function* goneAfterHello(): AsyncGenerator<StreamEvent> {
    yield event("hello", hello);
    throw new Failure("top: admin listener http://x refused the connection");
  }

  async function* onlyHello(): AsyncGenerator<StreamEvent> {
    yield event("hello", hello);
    await new Promise(() => {});
  }

  test("a listener that goes away is said to be gone, and asked again", async () => {
    const { clock, terminal, ended } = session(goneAfterHello, goneAfterHello);
    await clock.run(clock.now() + 1);
    assert.match(terminal.pictures.at(-1)!, /refused the connection; trying again/);
    assert.match(terminal.pictures.at(-1)!, /1,804 req\/s/);
    const before = terminal.pictures.length;
    await clock.run(clock.now() + 600);
    assert.doesNotMatch(terminal.pictures[before]!, /trying again/);
    terminal.input!.key("q");
    assert.equal(await ended, 0);
    assert.equal(terminal.closed, 1);
  });

  test("keys redraw, q and Ctrl-C end it, a signal too", async () => {
    for (const [end, code] of [
      [(input: TopInput) => input.key("q"), 0],
      [(input: TopInput) => input.key("\u0003"), 0],
      [(input: TopInput) => input.ended("SIGTERM"), 143],
      [(input: TopInput) => input.ended("SIGINT"), 130],
    ] as const) {
      const { clock, terminal, ended } = session(goneAfterHello);
      await clock.run(clock.now() + 1);
      terminal.input!.key("m");
      assert.match(terminal.pictures.at(-1)!, /^FERRY rerank/);
      terminal.input!.key("x");
      end(terminal.input!);
      assert.equal(await ended, code);
      assert.equal(terminal.closed, 1);
    }
  });

  test("while paused nothing moves", async () => {
    let release = (): void => {};
    const more = new Promise<void>((resolve) => (release = resolve));
    const { clock, terminal } = session(async function* () {
      yield event("hello", hello);
      await more;
      yield event("frame", { ...frame, now: NOW + 500 });
      yield* onlyHello();
    });
    await clock.run(clock.now() + 1);
    terminal.input!.key("p");
    const before = terminal.pictures.length;
    release();
    await clock.run(clock.now() + 1);
    assert.equal(terminal.pictures.length, before);
    terminal.input!.key("p");
    assert.equal(terminal.pictures.length, before + 1);
  });

  test("what is wrong from the start is a line where one typed, not a screen", async () => {
    const { terminal, ended } = session(async function* () {
      yield* [];
      throw new Failure("top: admin listener http://x refused the token; check admin.token");
    });
    await assert.rejects(ended, /refused the token/);
    assert.equal(terminal.input, undefined);
  });
});
