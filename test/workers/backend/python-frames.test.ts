import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { callFrame, FRAME, FrameReader, readReply } from "../../../src/workers/backend/python.ts";
import { DTYPES, elementBytes, tensorText } from "../../../src/core/tensor.ts";
import { batchOf, outputsOf } from "../../contract/backend.ts";

interface Heard {
  readonly kind: number;
  readonly payload: Buffer;
}

function frame({ kind, payload }: Heard): Buffer {
  const header = Buffer.alloc(5);
  header.writeUInt32LE(payload.length, 0);
  header.writeUInt8(kind, 4);
  return Buffer.concat([header, payload]);
}

/** All that is heard when the bytes come in these pieces. */
function heardOf(pieces: readonly Buffer[], maxBytes = 1 << 20): Heard[] {
  const heard: Heard[] = [];
  const reader = new FrameReader(maxBytes, (kind, payload) =>
    heard.push({ kind, payload: Buffer.from(payload) }),
  );
  for (const piece of pieces) assert.ok(reader.read(piece));
  return heard;
}

const u32 = (...values: number[]): Buffer => {
  const bytes = Buffer.alloc(4 * values.length);
  values.forEach((value, at) => bytes.writeUInt32LE(value, 4 * at));
  return bytes;
};

describe("frames of a Python worker", () => {
  const three = [
    { kind: FRAME.ready, payload: Buffer.alloc(0) },
    { kind: FRAME.begun, payload: u32(7, 0) },
    { kind: FRAME.outputs, payload: Buffer.concat([u32(7, 1, 3), Buffer.from('"x"')]) },
  ];
  const bytes = Buffer.concat(three.map(frame));

  test("are the same wherever they are cut", () => {
    for (let first = 0; first <= bytes.length; first++) {
      for (let second = first; second <= bytes.length; second++) {
        const pieces = [bytes.subarray(0, first), bytes.subarray(first, second), bytes.subarray(second)];
        assert.deepEqual(heardOf(pieces), three);
      }
    }
    assert.deepEqual(heardOf(Array.from(bytes, (byte) => Buffer.from([byte]))), three);
  });

  test("any frames, cut anywhere, are heard whole and in order", () => {
    const payloads = fc.uint8Array({ maxLength: 300 }).map((each) => Buffer.from(each));
    const frames = fc.array(
      fc.tuple(fc.nat(255), payloads).map(([kind, payload]) => ({ kind, payload })),
      { maxLength: 8 },
    );
    fc.assert(
      fc.property(frames, fc.array(fc.integer({ min: 1, max: 200 })), (sent, sizes) => {
        const all = Buffer.concat(sent.map(frame));
        const cuts: Buffer[] = [];
        let at = 0;
        for (const size of sizes) cuts.push(all.subarray(at, (at += size)));
        assert.deepEqual(heardOf([...cuts, all.subarray(at)]), sent);
      }),
    );
  });

  test("one that is too large ends the reading", () => {
    const reader = new FrameReader(10, () => assert.fail("nothing is heard"));
    assert.equal(reader.read(frame({ kind: 4, payload: Buffer.alloc(11) })), false);
  });

  test("a call is one, with its text in UTF-8", () => {
    const [heard] = heardOf([callFrame(9, '["é"]', false)]);
    assert.deepEqual(heard, {
      kind: FRAME.call,
      payload: Buffer.concat([u32(9), Buffer.from('["é"]')]),
    });
  });
});

describe("a reply of a Python worker", () => {
  const outputs = fc.array(
    fc.oneof(
      fc.record({ json: fc.json() }),
      fc.record({ bytes: fc.uint8Array({ maxLength: 20 }) }),
      fc
        .tuple(fc.constantFrom(...DTYPES), fc.array(fc.integer({ min: 0, max: 3 }), { maxLength: 3 }))
        .chain(([dtype, shape]) => {
          const length = shape.reduce((product, each) => product * each, elementBytes(dtype));
          return fc
            .uint8Array({ minLength: length, maxLength: length })
            .map((data) => ({ dtype, shape, data }));
        }),
    ),
    { maxLength: 6 },
  );

  /** As ferry_worker.py writes it: the table, then the data. */
  function mixed(
    list: readonly (typeof outputs extends fc.Arbitrary<infer T> ? T : never)[number][],
  ): Buffer {
    const table: Buffer[] = [u32(1, list.length)];
    const data: Buffer[] = [];
    for (const each of list) {
      const [type, shape, bytes] =
        "json" in each
          ? [0, [], Buffer.from(each.json)]
          : "bytes" in each
            ? [1, [], Buffer.from(each.bytes)]
            : [2 + DTYPES.indexOf(each.dtype), each.shape, Buffer.from(each.data)];
      table.push(Buffer.from([type, shape.length]), u32(bytes.length, ...shape));
      data.push(bytes);
    }
    return Buffer.concat([...table, ...data]);
  }

  test("of mixed outputs: each task has its own", () => {
    fc.assert(
      fc.property(outputs, (list) => {
        const batch = batchOf(list.map(() => "0"));
        const reply = readReply(batch, FRAME.outputs, mixed(list));
        const wanted = list.map((each) =>
          "json" in each
            ? each.json
            : "bytes" in each
              ? `{"$bytes":"${Buffer.from(each.bytes).toString("base64")}"}`
              : tensorText({ ...each, base64: Buffer.from(each.data).toString("base64") }),
        );
        assert.deepEqual(outputsOf(batch, reply!), wanted);
      }),
    );
  });

  test("of rows: each task has its own", () => {
    const payload = Buffer.concat([
      u32(1, 2),
      Buffer.from([2 + DTYPES.indexOf("int16"), 1]),
      u32(2),
      Buffer.from([1, 0, 2, 0, 3, 0, 4, 0]),
    ]);
    const batch = batchOf(["0", "0"]);
    assert.deepEqual(outputsOf(batch, readReply(batch, FRAME.rows, payload)!), [
      '{"$tensor":"int16","shape":[2],"base64":"AQACAA=="}',
      '{"$tensor":"int16","shape":[2],"base64":"AwAEAA=="}',
    ]);
    for (const more of [-8, -1, 1, 4]) {
      const wrong = Buffer.concat([payload, Buffer.alloc(9)]).subarray(0, payload.length + more);
      assert.equal(readReply(batch, FRAME.rows, wrong), undefined);
    }
  });

  test("four billion rows of nothing cost nothing", () => {
    const payload = Buffer.concat([u32(1, 0xff_ff_ff_ff), Buffer.from([2, 1]), u32(0)]);
    const reply = readReply(batchOf(["0"]), FRAME.rows, payload);
    assert.equal(
      reply?.kind === "unusable" && reply.message,
      "worker returned 4294967295 outputs for 1 input",
    );
  });

  test("of any bytes at all is a reply or nothing, never a crash", () => {
    const kinds = fc.constantFrom(FRAME.outputs, FRAME.rows, FRAME.rejected, FRAME.unusable, 77);
    const noise = fc.uint8Array({ maxLength: 60 }).map((each) => Buffer.from(each));
    const near = fc
      .tuple(outputs.map(mixed), fc.nat(), fc.nat(255))
      .map(([payload, at, byte]) => ((payload[at % payload.length] = byte), payload));
    fc.assert(
      fc.property(kinds, fc.oneof(noise, near), (kind, payload) => {
        readReply(batchOf(["0", "0"]), kind, payload);
      }),
      { numRuns: 3000 },
    );
  });
});
