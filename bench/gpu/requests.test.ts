/** The load's requests are each their own, and know by which numbers their answers begin. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { type Shape, TokenRequests } from "./requests.ts";

interface Body {
  readonly input: readonly number[];
  readonly model: string;
  readonly encoding?: string;
  readonly encoding_format?: string;
}

function take(requests: TokenRequests): { body: Body; sums: number[]; head: string } {
  const [head, text] = requests.next().split("\r\n\r\n");
  assert.match(head!, new RegExp(`\r\ncontent-length: ${text!.length}$`));
  const bytes = Buffer.from(requests.marker, "base64");
  return { body: JSON.parse(text!) as Body, sums: [0, 4, 8].map((at) => bytes.readFloatLE(at)), head: head! };
}

function made(process: number, shape: Shape = "native"): TokenRequests {
  return new TokenRequests({ authority: "a:1", path: "/x", model: "embed", tokens: 128, shape, process });
}

test("a marker is the three sums over the request's own tokens, as float32", () => {
  const requests = made(3);
  for (let count = 0; count < 50; count++) {
    const { body, sums } = take(requests);
    assert.equal(body.input.length, 128);
    const weighed = (weight: (at: number) => number): number =>
      body.input.reduce((sum, id, at) => sum + id * weight(at), 0) % 2 ** 24;
    const expected = [
      weighed((at) => at + 1),
      weighed((at) => ((at * 37) % 997) + 1),
      weighed((at) => ((at * at) % 991) + 1),
    ];
    assert.deepEqual(sums, expected);
    assert.equal(requests.marker.length, 16);
  }
});

test("no two are equal, nor are two processes' markers, and both shapes ask for base64", () => {
  const markers = new Set<string>();
  for (const requests of [made(0), made(1)]) {
    for (let count = 0; count < 30_000; count++) {
      requests.next();
      markers.add(requests.marker);
    }
  }
  assert.equal(markers.size, 60_000);
  assert.equal(take(made(0)).body.encoding, "base64");
  const openai = take(made(0, "openai"));
  assert.deepEqual([openai.body.encoding_format, openai.body.encoding], ["base64", undefined]);
  assert.match(openai.head, /^POST \/x HTTP\/1\.1\r\nhost: a:1\r\n/);
});
