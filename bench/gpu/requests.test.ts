/** The load's requests are each their own, and know by which numbers their answers begin. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { CLASSES, lengthsOf, type Shape, type TokenOptions, TokenRequests } from "./requests.ts";

interface Body {
  readonly input: readonly number[];
  readonly model: string;
  readonly encoding?: string;
  readonly encoding_format?: string;
}

function take(requests: TokenRequests, kind = 0): { body: Body; sums: number[]; head: string } {
  const [head, text] = requests.next(kind).split("\r\n\r\n");
  assert.match(head!, new RegExp(`\r\ncontent-length: ${text!.length}$`));
  const bytes = Buffer.from(requests.marker, "base64");
  return { body: JSON.parse(text!) as Body, sums: [0, 4, 8].map((at) => bytes.readFloatLE(at)), head: head! };
}

function made(process: number, shape: Shape = "native", more: Partial<TokenOptions> = {}): TokenRequests {
  const common = { authority: "a:1", path: "/x", model: "embed", tokens: 128, byClass: false };
  return new TokenRequests({ ...common, shape, process, ...more });
}

function sumsOver(input: readonly number[]): number[] {
  const weighed = (weight: (at: number) => number): number =>
    input.reduce((sum, id, at) => sum + id * weight(at), 0) % 2 ** 24;
  return [
    weighed((at) => at + 1),
    weighed((at) => ((at * 37) % 997) + 1),
    weighed((at) => ((at * at) % 991) + 1),
  ];
}

test("a marker is the three sums over the request's own tokens, as float32", () => {
  const requests = made(3);
  for (let count = 0; count < 50; count++) {
    const { body, sums } = take(requests);
    assert.equal(body.input.length, 128);
    assert.deepEqual(sums, sumsOver(body.input));
    assert.equal(requests.marker.length, 16);
  }
});

test("no two are equal, nor are two processes' markers, and both shapes ask for base64", () => {
  const markers = new Set<string>();
  for (const requests of [made(0), made(1)]) {
    for (let count = 0; count < 30_000; count++) {
      requests.next(0);
      markers.add(requests.marker);
    }
  }
  assert.equal(markers.size, 60_000);
  assert.equal(take(made(0)).body.encoding, "base64");
  const openai = take(made(0, "openai"));
  assert.deepEqual([openai.body.encoding_format, openai.body.encoding], ["base64", undefined]);
  assert.match(openai.head, /^POST \/x HTTP\/1\.1\r\nhost: a:1\r\n/);
});

test("of a mix: the lengths of the process in order, each with its own sums, the same in every run", () => {
  const lengths = lengthsOf("mixed", 2);
  assert.notDeepEqual(lengths.slice(0, 50), lengthsOf("mixed", 3).slice(0, 50));
  for (const requests of [made(2, "native", { tokens: "mixed" }), made(2, "native", { tokens: "mixed" })]) {
    for (const length of lengths.slice(0, 200)) {
      const { body, sums } = take(requests);
      assert.equal(body.input.length, length);
      assert.deepEqual(sums, sumsOver(body.input));
    }
  }
  assert.throws(() => made(0, "native", { tokens: "nonsense" }), /no mix of lengths is called nonsense/);
});

test("by class: each kind has its own lengths, in the share that they have", () => {
  const requests = made(0, "native", { tokens: "mixed", byClass: true });
  assert.deepEqual(
    requests.kinds.map(({ label }) => label),
    ["short", "middle", "long"],
  );
  for (const [kind, share] of [0.5, 0.395, 0.105].entries()) {
    assert.ok(Math.abs(requests.kinds[kind]!.share - share) < 0.03);
    const { from, to } = CLASSES[kind]!;
    for (let count = 0; count < 100; count++) {
      const { length } = take(requests, kind).body.input;
      assert.ok(length >= from && length <= to);
    }
  }
});
