import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { errors } from "../../src/core/errors.ts";
import { DISPATCH_REASONS } from "../../src/core/task.ts";
import { type AnsweredRequest, type EventFields, Events, SHED_REASONS } from "../../src/observe/events.ts";
import { EventRelay, replayEvents } from "../../src/observe/relay.ts";
import { answered } from "./stage.ts";

type Relayed =
  | { readonly name: "request.answered"; readonly fields: AnsweredRequest }
  | { readonly name: "request.shed"; readonly fields: EventFields["request.shed"] }
  | { readonly name: "task.queued"; readonly fields: EventFields["task.queued"] }
  | { readonly name: "notice"; readonly fields: EventFields["notice"] };

function collect(events: Events): Relayed[] {
  const all: Relayed[] = [];
  events.on("request.answered", (fields) => all.push({ name: "request.answered", fields }));
  events.on("request.shed", (fields) => all.push({ name: "request.shed", fields }));
  events.on("task.queued", (fields) => all.push({ name: "task.queued", fields }));
  events.on("notice", (fields) => all.push({ name: "notice", fields }));
  return all;
}

function emit(events: Events, { name, fields }: Relayed): void {
  events.emit(name, fields);
}

/** An optional field that is absent and one that is undefined are the same to listeners. */
function present(fields: object): object {
  return JSON.parse(JSON.stringify(fields)) as object;
}

const anyText = fc.string({ unit: "binary", maxLength: 20 });
/** Lone surrogates too: a path is what a client wrote. */
const untrusted = fc.oneof(anyText, fc.constant("\ud800"), fc.constant('"],[0]'), fc.constant("__proto__"));
const instant = fc.double({ min: 0, max: 2e12, noNaN: true, noDefaultInfinity: true });
const batch = fc.record({
  id: fc.uuid(),
  size: fc.nat(64),
  reason: fc.constantFrom(...DISPATCH_REASONS),
  worker: anyText,
  startedAt: instant,
  why: anyText,
});
const trace = fc.record({ traceId: anyText, spanId: anyText, parentId: anyText, state: untrusted });

function requestOf(batches: fc.Arbitrary<AnsweredRequest["ending"]>): fc.Arbitrary<AnsweredRequest> {
  return fc.record({
    id: anyText,
    method: untrusted,
    route: fc.constantFrom("", "/v1/inference", "/v1/tasks/{id}"),
    path: fc.option(untrusted, { nil: undefined }),
    model: untrusted,
    tier: anyText,
    tenant: untrusted,
    status: fc.integer({ min: 100, max: 599 }),
    code: fc.constantFrom("" as const, ...(Object.keys(errors) as AnsweredRequest["code"][])),
    startedAt: instant,
    latencyMs: instant,
    work: fc.constantFrom("own" as const, "joined" as const, "cached" as const),
    ending: fc.option(batches, { nil: undefined }),
    trace: fc.option(trace, { nil: undefined }),
  });
}

/** Few batches, so that several requests of a message share one. */
const relayed: fc.Arbitrary<Relayed[]> = fc
  .array(fc.option(batch, { nil: undefined }), { minLength: 1, maxLength: 4 })
  .chain((batches) => {
    const ending = fc.record({
      queuedAt: instant,
      attempt: fc.nat(5),
      settledAt: fc.option(instant, { nil: undefined }),
      batch: fc.constantFrom(...batches),
    });
    const shed = fc.record({
      model: untrusted,
      tier: anyText,
      tenant: untrusted,
      reason: fc.constantFrom(...SHED_REASONS),
      retryAfterMs: fc.nat(),
    });
    const level = fc.constantFrom("info" as const, "warn" as const, "error" as const);
    return fc.array(
      fc.oneof(
        requestOf(ending).map((fields): Relayed => ({ name: "request.answered", fields })),
        shed.map((fields): Relayed => ({ name: "request.shed", fields })),
        fc
          .record({ level, message: untrusted, logged: fc.constant(true) })
          .map((fields): Relayed => ({ name: "notice", fields })),
        fc
          .record({ id: anyText, model: untrusted, tier: fc.nat(9), at: instant })
          .map((fields): Relayed => ({ name: "task.queued", fields })),
      ),
      { maxLength: 40 },
    );
  });

class Stage {
  readonly gateway = new Events();
  readonly core = new Events();
  readonly clock = new VirtualClock();
  readonly relay: EventRelay;
  readonly arrived: Relayed[];
  /** As the socket carries them. */
  readonly messages: Buffer[] = [];
  away = false;

  constructor() {
    this.arrived = collect(this.core);
    this.relay = new EventRelay(this.gateway, this.clock, (text) => {
      if (this.away) return false;
      const bytes = Buffer.from(text);
      this.messages.push(bytes);
      replayEvents(bytes.toString(), this.core);
      return true;
    });
  }
}

describe("events over a wire", () => {
  test("arrive in their order with equal fields, whatever their texts are", () => {
    fc.assert(
      fc.property(relayed, (sent) => {
        const stage = new Stage();
        for (const each of sent) emit(stage.gateway, each);
        stage.relay.close();
        assert.deepEqual(stage.arrived.map(present), sent.map(present));
      }),
    );
  });

  test("wait for each other for 20 ms", async () => {
    const stage = new Stage();
    const { clock } = stage;
    for (let n = 0; n < 10; n++) stage.gateway.emit("request.answered", answered({ id: String(n) }));
    await clock.run(clock.now() + 19);
    assert.equal(stage.messages.length, 0);
    await clock.run(clock.now() + 2);
    assert.deepEqual([stage.messages.length, stage.arrived.length], [1, 10]);
  });

  test("do not wait when they are many", () => {
    const stage = new Stage();
    for (let n = 0; n < 2000; n++) stage.gateway.emit("request.answered", answered({ id: String(n) }));
    assert.equal(stage.messages.length, 3);
    stage.relay.close();
    assert.equal(stage.arrived.length, 2000);
  });

  test("are kept up to a bound while the core is away, and one notice counts the others", async () => {
    const stage = new Stage();
    stage.away = true;
    for (let n = 0; n < 5000; n++) {
      stage.gateway.emit("request.answered", answered({ id: String(n) }));
      if (n % 1000 === 0) await stage.clock.run(stage.clock.now() + 20);
    }
    stage.away = false;
    await stage.clock.run(stage.clock.now() + 40);
    const ids = stage.arrived.flatMap(({ name, fields }) => (name === "request.answered" ? fields.id : []));
    assert.deepEqual(
      ids,
      Array.from({ length: 4096 }, (_, n) => String(n)),
    );
    const message = "904 events of requests were dropped while the core process was away";
    assert.deepEqual(
      stage.arrived.filter(({ name }) => name === "notice"),
      [{ name: "notice", fields: { level: "warn", message, logged: true } }],
    );
    stage.gateway.emit("request.answered", answered({ id: "later" }));
    stage.relay.close();
    assert.equal(stage.arrived.length, 4096 + 2);
  });

  test("are no longer heard after the end", () => {
    const stage = new Stage();
    stage.relay.close();
    stage.gateway.emit("notice", { level: "info", message: "late" });
    assert.equal(stage.gateway.heard("request.answered"), false);
    assert.deepEqual(stage.arrived, []);
  });
});
