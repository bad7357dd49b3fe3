/** The messages between gateways and the core: any content survives, and no bytes do harm. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { errors, type ErrorCode, Refusal } from "../../src/core/errors.ts";
import { DISPATCH_REASONS } from "../../src/core/task.ts";
import type { Placed, RecordView, Sharing } from "../../src/engine/engine.ts";
import { Channel } from "../../src/engine/remote/channel.ts";
import * as wire from "../../src/engine/remote/wire.ts";
import { usually } from "../fixtures/long.ts";
import { PLAIN } from "../contract/engine-stage.ts";
import { Cable, Machine } from "./remote-stage.ts";

const numRuns = usually(200, 5000);

/** One byte per character, two, lone surrogates, none. */
const text = fc.oneof(
  fc.string(),
  fc.string({ unit: "binary" }),
  fc.string({ unit: fc.integer({ min: 0, max: 0xffff }).map((code) => String.fromCharCode(code)) }),
  fc.constantFrom("", "ann", "é", "ÿ", "Ā", "\ud800", "漢字", "x".repeat(300), "漢".repeat(300)),
);
const time = fc.double({ noNaN: true, noDefaultInfinity: true });
const count = fc.nat({ max: 0xffff_ffff });

const task = fc.record(
  {
    id: text,
    tenant: text,
    tier: count,
    model: text,
    input: text,
    parameters: text,
    content: text,
    createdAt: time,
    deadlineAt: time,
    trace: text,
  },
  {
    requiredKeys: [
      "id",
      "tenant",
      "tier",
      "model",
      "input",
      "parameters",
      "content",
      "createdAt",
      "deadlineAt",
    ],
  },
);

const sharing: fc.Arbitrary<Sharing> = fc.record(
  {
    joinKey: text,
    cacheKey: text,
    cacheTtlMs: time,
    idempotency: fc.record({ key: text, fingerprint: text }),
    only: fc.constant(true),
  },
  { requiredKeys: [] },
);

const code = fc.constantFrom(...(Object.keys(errors) as ErrorCode[]));
const notes = fc
  .record({
    id: text,
    size: count,
    reason: fc.constantFrom(...DISPATCH_REASONS),
    worker: text,
    startedAt: time,
    why: text,
  })
  .chain((first) => fc.constantFrom(first, { ...first, id: "another" }));

const pending = fc.record(
  {
    task,
    state: fc.constantFrom("queued" as const, "running" as const),
    attempt: count,
    queuedAt: time,
    cached: fc.constant(false),
    batch: notes,
  },
  { requiredKeys: ["task", "state", "attempt", "queuedAt", "cached"] },
);

const ended = fc.record(
  {
    task: task.map((each) => ({ ...each, input: "", parameters: "", content: "" })),
    state: fc.constantFrom("done" as const, "failed" as const),
    attempt: count,
    queuedAt: time,
    settledAt: time,
    cached: fc.boolean(),
    batch: notes,
    outcome: fc.oneof(
      fc.record({ ok: fc.constant(true as const), output: text }),
      fc.record({ ok: fc.constant(false as const), code, message: text }),
    ),
  },
  { requiredKeys: ["task", "state", "attempt", "queuedAt", "settledAt", "cached", "outcome"] },
);
const record: fc.Arbitrary<RecordView> = fc.oneof(pending, ended);

const placed: fc.Arbitrary<Placed> = fc.oneof(
  fc.record({ kind: fc.constantFrom("queued" as const, "joined" as const, "conflict" as const), id: text }),
  fc.record({ record, cached: fc.boolean(), unstored: fc.boolean() }).map(({ unstored, ...rest }) => ({
    kind: "done" as const,
    id: rest.record.task.id,
    ...rest,
    ...(unstored && { unstored: true as const }),
  })),
  fc.record(
    {
      kind: fc.constant("full" as const),
      message: text,
      own: fc.boolean(),
      never: fc.boolean(),
      retryInMs: time,
    },
    { requiredKeys: ["kind", "message"] },
  ),
  fc.record({
    kind: fc.constant("refused" as const),
    reason: fc.constantFrom("no_worker" as const, "capacity" as const, "deadline" as const),
    code: fc.constantFrom("RATE_LIMITED" as const, "SERVICE_OVERLOADED" as const),
    message: text,
    waitMs: time,
  }),
);

type Content =
  | { readonly put: wire.PutMessage }
  | { readonly record: RecordView }
  | { readonly placed: Placed; readonly id: string };

const content: fc.Arbitrary<Content> = fc.oneof(
  fc.record({ put: fc.record({ task, sharing, ofMany: fc.boolean() }) }),
  fc.record({ record }),
  fc.record({ placed, id: text }),
);

function written(contents: readonly Content[]): Buffer {
  const out = new wire.WireWriter();
  for (const each of contents) {
    if ("put" in each) {
      out.begin(wire.PUT);
      wire.writePut(out, each.put.task, each.put.sharing, each.put.ofMany);
    } else if ("record" in each) {
      out.begin(wire.SETTLED);
      wire.writeRecordView(out, each.record);
    } else {
      out.begin(wire.PLACED);
      wire.writePlaced(out, each.placed, each.id);
    }
    out.end();
  }
  return Buffer.concat(out.size === 0 ? [] : out.take());
}

/** What a channel reads of these bytes, cut into pieces, until it closes. */
function read(pieces: readonly Buffer[], ids: readonly string[] = []): { found: Content[]; why?: string } {
  const cable = new Cable();
  const found: Content[] = [];
  const result: { found: Content[]; why?: string } = { found };
  const closed = (why: string): void => void (result.why = why);
  const channel = new Channel(
    cable.core,
    (from) => {
      if (from.kind === wire.PUT) found.push({ put: wire.readPut(from) });
      else if (from.kind === wire.SETTLED) found.push({ record: wire.readRecordView(from) });
      else if (from.kind === wire.PLACED) {
        const id = ids[found.length] ?? "";
        found.push({ placed: wire.readPlaced(from, id), id });
      } else throw new wire.WireError("unknown");
    },
    closed,
  );
  assert.equal(channel.waiting, 0);
  for (const piece of pieces) cable.core.receive(piece);
  return result;
}

function cut(bytes: Buffer, sizes: readonly number[]): Buffer[] {
  const pieces: Buffer[] = [];
  let at = 0;
  for (let turn = 0; at < bytes.length; turn++) {
    const end = sizes.length === 0 ? bytes.length : at + sizes[turn % sizes.length]!;
    pieces.push(bytes.subarray(at, end));
    at = end;
  }
  return pieces;
}

const sizes = fc.array(fc.integer({ min: 1, max: 2000 }), { maxLength: 5 });

describe("messages", () => {
  test("arrive as they were sent, in whatever pieces", () => {
    fc.assert(
      fc.property(fc.array(content, { maxLength: 8 }), sizes, (contents, lengths) => {
        const ids = contents.map((each) => ("placed" in each ? each.id : ""));
        const { found, why } = read(cut(written(contents), lengths), ids);
        assert.equal(why, undefined);
        assert.deepEqual(found, structuredClone(contents)); // with prototypes
      }),
      { numRuns },
    );
  });

  test("larger than a chunk or a read arrive, too, and what repeats is not sent again", () => {
    const rest = { tenant: "ann", tier: 0, model: "m", content: "", createdAt: 1, deadlineAt: 2 };
    const parameters = "p".repeat(1 << 20);
    const puts = [300_000, 10, 1_000_000, 65_536].map((length, at) => ({
      put: {
        task: { id: String(at), ...rest, parameters, input: (at % 2 === 0 ? "a" : "漢").repeat(length) },
        sharing: {},
        ofMany: true,
      },
    }));
    const bytes = written(puts);
    assert.ok(bytes.length < parameters.length + 1_300_000 + 2 * 65_546 + 1000);
    const { found, why } = read(cut(bytes, [65_536]));
    assert.equal(why, undefined);
    assert.deepEqual(found, puts);
    const texts = found.map((each) => "put" in each && each.put.task.parameters);
    assert.ok(texts.every((each) => each === parameters));
  });

  test("that end early or were garbled end the connection, and throw nothing", () => {
    const garbled = fc.record({
      contents: fc.array(content, { minLength: 1, maxLength: 4 }),
      lengths: sizes,
      bytes: fc.array(fc.tuple(fc.nat(), fc.nat({ max: 255 })), { maxLength: 8 }),
      keep: fc.double({ min: 0, max: 1, noNaN: true }),
    });
    fc.assert(
      fc.property(garbled, ({ contents, lengths, bytes, keep }) => {
        const all = written(contents);
        for (const [at, byte] of bytes) all[at % all.length] = byte;
        read(cut(all.subarray(0, Math.ceil(keep * all.length)), lengths));
      }),
      { numRuns: 5 * numRuns },
    );
  });

  test("of refusals keep their code, status and time", () => {
    const out = new wire.WireWriter();
    out.begin(wire.REFUSED);
    wire.writeRefusal(out, new Refusal("RATE_LIMITED", "später", { status: 418, retryAfterMs: 70 }));
    out.end();
    const from = new wire.WireReader();
    const [bytes] = out.take();
    from.over(bytes!);
    from.message(4, bytes!.length);
    const { code: found, status, message, retryAfterMs } = wire.readRefusal(from);
    assert.deepEqual([found, status, message, retryAfterMs], ["RATE_LIMITED", 418, "später", 70]);
    from.done();
  });
});

test("whatever bytes reach a core or a gateway, they end that connection at most", async () => {
  const machine = new Machine(PLAIN);
  machine.start(undefined, { put: ({ id }) => ({ kind: "queued", id }) });
  const remote = await machine.opened();
  const message = fc
    .tuple(fc.integer({ min: 0, max: 24 }), fc.uint8Array({ maxLength: 60 }))
    .map(([kind, bytes]) => {
      const head = Buffer.from([0, 0, 0, 0, kind]);
      head.writeUInt32LE(bytes.length + 1);
      return Buffer.concat([head, bytes]);
    });
  const garbage = fc.oneof(
    message,
    fc.uint8Array({ maxLength: 60 }).map((bytes) => Buffer.from(bytes)),
  );
  await fc.assert(
    fc.asyncProperty(fc.array(garbage, { maxLength: 4 }), fc.boolean(), async (pieces, toCore) => {
      const cable = machine.cables.at(-1)!;
      for (const piece of pieces) (toCore ? cable.core : cable.gateway).receive(piece);
      await machine.pass(100);
      assert.equal(remote.connected, true);
    }),
    { numRuns },
  );
  await remote.close();
});
