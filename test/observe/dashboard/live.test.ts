/** The stream: told once, then what changed; nobody waits for a slow viewer, and nobody looking costs nothing. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { get, type IncomingMessage } from "node:http";
import { describe, test } from "node:test";
import { SystemClock } from "../../../src/app/clock.ts";
import { Refusal } from "../../../src/core/errors.ts";
import type { Frame } from "../../../src/observe/dashboard/frames.ts";
import { Live } from "../../../src/observe/dashboard/live.ts";
import type { Exchange, Outflow } from "../../../src/gateway/exchange.ts";
import { Listener } from "../../../src/gateway/server.ts";
import { VirtualClock } from "../../../src/cli/plan/virtual-clock.ts";
import { Events } from "../../../src/observe/events.ts";

const START = 1_000_000;
const about = {
  version: "1.2.3",
  startedAt: START,
  role: "all",
  engine: "memory",
  demo: true,
  tiers: ["gold"],
  models: [],
};

/** Counts what is asked of it; every frame has its number. */
class CountedFold {
  frames = 0;
  hellos = 0;
  padding = "";

  frame(): Frame {
    return { now: ++this.frames } as Frame;
  }

  hello(): Frame {
    this.hellos++;
    return { now: this.frames, padding: this.padding } as unknown as Frame;
  }
}

class Viewer implements Outflow {
  text = "";
  behind = false;
  ended = false;
  wasCut = false;
  leave: () => void = () => {};

  write(text: string): void {
    assert.ok(!this.behind, "nothing is written to a viewer that is behind");
    this.text += text;
  }

  end(): void {
    this.ended = true;
  }

  cut(): void {
    this.wasCut = true;
  }

  /** What it was told: "hello 3", "frame 4". */
  get told(): string[] {
    return [...this.text.matchAll(/^event: (\w+)\ndata: (.*)$/gm)].map(([, name, data]) => {
      const value = JSON.parse(data!) as { now?: number; frame?: { now: number } };
      return `${name} ${value.now ?? value.frame?.now}`;
    });
  }
}

function stage({ stuckMs = 30_000 } = {}) {
  const clock = new VirtualClock(START);
  const fold = new CountedFold();
  const rules = { maxViewers: 20, stuckMs };
  const live = new Live(rules, fold, about, () => "http://127.0.0.1:1", clock);
  const watch = (): Viewer => {
    const viewer = new Viewer();
    live.watch({
      method: "GET",
      stream: () => viewer,
      onGone: (gone) => void (viewer.leave = gone),
      sendNothing: () => assert.fail("a stream was asked for"),
    });
    return viewer;
  };
  const to = (ms: number): Promise<number> => clock.run(START + ms + 0.01);
  return { clock, fold, live, watch, to };
}

describe("viewers", () => {
  test("a hello, then a frame each half second, made once for all", async () => {
    const { fold, watch, to } = stage();
    const one = watch();
    await to(1000);
    const two = watch();
    await to(2000);
    assert.deepEqual(one.told, ["hello 0", "frame 1", "frame 2", "frame 3", "frame 4", "frame 5"]);
    // The others were told all that the newcomer's hello has, so that frames go on from there for everybody.
    assert.deepEqual(two.told, ["hello 3", "frame 4", "frame 5"]);
    assert.equal(fold.frames, 5);
  });

  test("while nobody watches there is no timer", async () => {
    const { fold, live, watch, to } = stage();
    assert.equal(await to(10_000), 0);
    const viewer = watch();
    await to(10_600);
    viewer.leave();
    assert.equal(live.viewers, 0);
    assert.equal(await to(60_000), 0);
    assert.equal(fold.frames, 1);
    watch();
    await to(60_600);
    assert.equal(fold.frames, 2);
  });

  test("one that is behind loses frames, and is told everything when it is back", async () => {
    const { watch, to } = stage();
    const [quick, slow] = [watch(), watch()];
    await to(600);
    slow.behind = true;
    await to(1600);
    slow.behind = false;
    await to(2600);
    assert.deepEqual(quick.told.slice(1), ["frame 1", "frame 2", "frame 3", "frame 4", "frame 5", "frame 6"]);
    assert.deepEqual(slow.told, ["hello 1", "frame 2", "hello 5", "frame 6"]);
  });

  test("one that takes nothing for too long is cut off", async () => {
    const { live, watch, to } = stage();
    const viewer = watch();
    viewer.behind = true;
    await to(30_000);
    assert.ok(!viewer.wasCut);
    await to(32_000);
    assert.ok(viewer.wasCut);
    assert.equal(live.viewers, 0);
  });

  test("the 21st is refused, until one of the others leaves", () => {
    const { watch } = stage();
    const viewers = Array.from({ length: 20 }, watch);
    assert.throws(watch, (error) => {
      assert.ok(error instanceof Refusal);
      assert.equal(error.status, 503);
      assert.match(error.message, /^20 viewers watch already; close one/);
      return true;
    });
    viewers[3]!.leave();
    watch();
  });

  test("the end of the process is the end of the stream", async () => {
    const { live, watch, to } = stage();
    const viewer = watch();
    live.close();
    assert.ok(viewer.ended);
    assert.equal(await to(5000), 0);
    assert.throws(watch, /being stopped/);
  });

  test("HEAD is answered and does not watch", () => {
    const { live } = stage();
    let status = 0;
    const exchange = { method: "HEAD", sendNothing: (given: number) => void (status = given) };
    live.watch(exchange as unknown as Exchange);
    assert.equal(status, 200);
    assert.equal(live.viewers, 0);
  });
});

const limits = {
  maxBodyBytes: 1000,
  maxHeaders: 100,
  maxConnections: 100,
  headersTimeoutMs: 5000,
  requestTimeoutMs: 30_000,
  keepAliveTimeoutMs: 5000,
};

test("over a real socket: a viewer that does not read gets no buffer, and everything when it reads", async () => {
  const { clock, fold, live } = stage({ stuckMs: Infinity });
  // More than the kernel takes for somebody who does not read.
  fold.padding = "x".repeat(24 * 1024 * 1024);
  const listener = new Listener(live.routes(), limits, new SystemClock(), new Events());
  const url = await listener.listen("127.0.0.1", 0);
  try {
    const request = get(`${url}/internal/live`);
    const [response] = (await once(request, "response")) as [IncomingMessage];
    assert.equal(response.headers["content-type"], "text/event-stream; charset=utf-8");
    assert.equal(response.headers["cache-control"], "no-store");
    for (let n = 1; n <= 20; n++) await clock.run(START + 510 * n);
    assert.ok(fold.frames >= 19);
    assert.equal(fold.hellos, 1);
    // It reads now: first what it was sent, then, with the next frame, everything.
    fold.padding = "";
    const came = { hellos: 0, frames: 0 };
    let tail = "";
    response.setEncoding("latin1").on("data", (text: string) => {
      const joined = tail + text;
      came.hellos += joined.split("event: hello\n").length - 1;
      came.frames += joined.split("event: frame\n").length - 1;
      tail = joined.slice(-12);
    });
    let at = 20;
    while (came.hellos < 2 || came.frames < 1) {
      await clock.run(START + 510 * ++at);
      assert.ok(at < 20_000, JSON.stringify(came));
    }
    assert.equal(came.hellos, 2);
    request.destroy();
    await once(request, "close");
  } finally {
    live.close();
    listener.close();
  }
});
