/** W3C trace context, level 1 and 2, as text: what is read, what is not, and the ids that follow from others. */
import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { describe, test } from "node:test";
import fc from "fast-check";
import {
  batchSpan,
  callSpan,
  queueSpan,
  readTraceparent,
  readTracestate,
  Sampler,
  traceparent,
} from "../../src/core/trace.ts";

const TRACE = "0af7651916cd43dd8448eb211c80319c";
const SPAN = "b7ad6b7169203331";
const GOOD = `00-${TRACE}-${SPAN}-01`;

const hex = (digits: number) =>
  fc
    .array(fc.integer({ min: 0, max: 15 }), { minLength: digits, maxLength: digits })
    .map((each) => each.map((digit) => digit.toString(16)).join(""))
    .filter((text) => /[^0]/.test(text));
const uuid = fc.uuid({ version: 4 });

describe("traceparent", () => {
  test("reads version 00", () => {
    assert.deepEqual(readTraceparent(GOOD), { traceId: TRACE, spanId: SPAN, sampled: true });
    assert.equal(readTraceparent(`00-${TRACE}-${SPAN}-00`)?.sampled, false);
    // The random flag of level 2, and flags to come.
    for (const [flags, sampled] of [
      ["02", false],
      ["03", true],
      ["ff", true],
      ["fe", false],
    ] as const)
      assert.equal(readTraceparent(`00-${TRACE}-${SPAN}-${flags}`)?.sampled, sampled, flags);
  });

  test("reads what it knows of later versions", () => {
    for (const text of [
      `cc-${TRACE}-${SPAN}-01`,
      `cc-${TRACE}-${SPAN}-01-what-the-future`,
      `01-${TRACE}-${SPAN}-01-`,
    ])
      assert.deepEqual(readTraceparent(text), { traceId: TRACE, spanId: SPAN, sampled: true }, text);
  });

  test("goes on without what is none", () => {
    const none = [
      "",
      "00",
      `ff-${TRACE}-${SPAN}-01`,
      `00-${TRACE}-${SPAN}-01-extra`,
      `00-${TRACE}-${SPAN}-01-`,
      `cc-${TRACE}-${SPAN}-01.extra`,
      `00-${"0".repeat(32)}-${SPAN}-01`,
      `00-${TRACE}-${"0".repeat(16)}-01`,
      GOOD.toUpperCase(),
      `00-${TRACE.slice(1)}-${SPAN}-01`,
      `00-${TRACE}-${SPAN}-1`,
      `00-${TRACE}-${SPAN}-0g`,
      `0-${TRACE}-${SPAN}-01`,
      `00_${TRACE}_${SPAN}_01`,
      // Two headers, as Node joins them.
      `${GOOD}, ${GOOD}`,
      `cc-${TRACE}-${SPAN}-01, ${GOOD}`,
    ];
    for (const text of none) assert.equal(readTraceparent(text), undefined, text);
  });

  test("what is written is read", () => {
    fc.assert(
      fc.property(hex(32), hex(16), (traceId, spanId) => {
        assert.deepEqual(readTraceparent(traceparent({ traceId, spanId })), {
          traceId,
          spanId,
          sampled: true,
        });
      }),
    );
  });

  test("any text is read or not, and never throws", () => {
    fc.assert(fc.property(fc.string({ unit: "binary" }), (text) => void readTraceparent(text)));
  });
});

describe("tracestate", () => {
  test("is kept as it came, blanks around members aside", () => {
    for (const [text, kept] of [
      ["a=1", "a=1"],
      ["rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"],
      ["a=1 ,\t b=2", "a=1,b=2"],
      ["a=1,,b=2,", "a=1,b=2"],
      ["fw529a3039@dt=FfAAAAAA,0tenant@sys=v", "fw529a3039@dt=FfAAAAAA,0tenant@sys=v"],
      ["a= x y", "a= x y"],
      ["", ""],
    ] as const)
      assert.equal(readTracestate(text), kept, text);
  });

  test("is left behind where it is malformed", () => {
    const bad = [
      "a",
      "=1",
      "a=",
      "A=1",
      "a=1=2",
      "a=1,a=2",
      "a b=1",
      "a=ü",
      "a=\u0001",
      "a@B=1",
      "a@=1",
      "a=1,b",
    ];
    for (const text of bad) assert.equal(readTracestate(text), "", text);
    const many = Array.from({ length: 33 }, (_, at) => `k${at}=1`).join(",");
    assert.equal(readTracestate(many), "");
    assert.equal(readTracestate(`a=${"x".repeat(257)}`), "");
    assert.equal(readTracestate(`a=${"x".repeat(9000)}`), "");
  });

  test("loses long members first, then the last ones, when it is too long", () => {
    const long = `long=${"x".repeat(200)}`;
    const short = (at: number): string => `k${at}=${"y".repeat(60)}`;
    const kept = readTracestate([short(1), long, short(2), short(3), short(4), short(5), short(6)].join(","));
    assert.equal(kept, [1, 2, 3, 4, 5, 6].map(short).join(","));
    const tail = readTracestate(Array.from({ length: 12 }, (_, at) => short(at)).join(","));
    assert.equal(tail, [0, 1, 2, 3, 4, 5, 6, 7].map(short).join(","));
  });

  test("whatever comes, what is kept is short, and is kept a second time", () => {
    const member = fc.tuple(fc.stringMatching(/^[a-z][a-z0-9]{0,40}$/), fc.stringMatching(/^[!-+]{1,250}$/));
    fc.assert(
      fc.property(fc.array(member, { maxLength: 40 }), fc.string(), (members, noise) => {
        for (const text of [members.map((pair) => pair.join("=")).join(","), noise]) {
          const kept = readTracestate(text);
          assert.ok(kept.length <= 512);
          assert.equal(readTracestate(kept), kept);
        }
      }),
    );
  });
});

describe("Sampler", () => {
  const always = new Sampler(1, () => 0.5);
  const never = new Sampler(0, () => 0);

  test("follows the caller, whatever the share", () => {
    const trace = never.begin(GOOD, "a=1");
    assert.partialDeepStrictEqual(trace, { traceId: TRACE, parentId: SPAN, state: "a=1" });
    assert.match(trace!.spanId, /^[0-9a-f]{16}$/);
    assert.notEqual(trace!.spanId, SPAN);
    assert.equal(always.begin(`00-${TRACE}-${SPAN}-00`, undefined), undefined);
  });

  test("takes its share of the others, whose tracestate means nothing", () => {
    assert.equal(never.begin(undefined, undefined), undefined);
    for (const header of [undefined, "garbage", `${GOOD}, ${GOOD}`]) {
      const trace = always.begin(header, "a=1");
      assert.deepEqual([trace?.parentId, trace?.state], ["", ""]);
    }
    let seed = 0;
    const third = new Sampler(0.3, () => (seed = (seed + 0.618_033_988_749) % 1));
    let traced = 0;
    for (let at = 0; at < 1000; at++) if (third.begin("garbage", undefined) !== undefined) traced++;
    assert.ok(traced > 100 && traced < 500, `${traced} of 1000`);
  });

  test("without the caller's word the trace's id decides, the same everywhere", () => {
    const ids = Array.from({ length: 2000 }, () => randomUUID().replaceAll("-", ""));
    const chosen = (share: number): string[] =>
      ids.filter((id) => {
        const header = `00-${id}-${SPAN}-00`;
        return new Sampler(share, () => 0.5, false).begin(header, undefined) !== undefined;
      });
    assert.equal(chosen(1).length, ids.length);
    assert.equal(chosen(0).length, 0);
    const some = chosen(0.25);
    assert.ok(some.length > 300 && some.length < 700, `${some.length} of 2000`);
    assert.deepEqual(
      new Set([...some, ...chosen(0.5)]).size,
      chosen(0.5).length,
      "a smaller share is a part",
    );
  });

  test("ids are well-formed, even where chance gives nothing but zeros", () => {
    fc.assert(
      fc.property(fc.double({ min: 0, max: 1, maxExcluded: true, noNaN: true }), (random) => {
        const trace = new Sampler(1, () => random).begin(undefined, undefined);
        if (trace !== undefined) assert.notEqual(readTraceparent(traceparent(trace)), undefined);
      }),
    );
    assert.notEqual(
      readTraceparent(traceparent(new Sampler(1, () => 0).begin(undefined, undefined)!)),
      undefined,
    );
  });
});

describe("ids that follow from a batch's", () => {
  test("are well-formed, and differ from each other", () => {
    fc.assert(
      fc.property(uuid, hex(32), hex(16), (batchId, traceId, spanId) => {
        const batch = batchSpan(batchId);
        const calls = Array.from({ length: 64 }, (_, at) => callSpan(batchId, at + 1));
        const queue = queueSpan({ traceId, spanId }, batchSpan(batchId));
        for (const place of [batch, ...calls, queue])
          assert.notEqual(readTraceparent(traceparent(place)), undefined, JSON.stringify(place));
        assert.ok(calls.every((call) => call.traceId === batch.traceId));
        assert.equal(new Set([batch, ...calls].map((place) => place.spanId)).size, 65);
        assert.equal(queue.traceId, traceId);
      }),
    );
  });

  test("a task's waits for two batches are two spans", () => {
    fc.assert(
      fc.property(uuid, uuid, hex(16), (one, other, spanId) => {
        fc.pre(one !== other);
        const request = { traceId: TRACE, spanId };
        assert.notEqual(
          queueSpan(request, batchSpan(one)).spanId,
          queueSpan(request, batchSpan(other)).spanId,
        );
        assert.deepEqual(queueSpan(request, batchSpan(one)), queueSpan(request, batchSpan(one)));
      }),
    );
    // The one request's span whose wait would have no id.
    const batchId = "11111111-2222-4333-8444-555566667777";
    const request = { traceId: TRACE, spanId: "1111111166667777" };
    assert.equal(queueSpan(request, batchSpan(batchId)).spanId, "0000000000000001");
  });
});
