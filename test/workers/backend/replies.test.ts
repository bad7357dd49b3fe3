import assert from "node:assert/strict";
import { describe, test } from "./suite.ts";
import fc from "fast-check";
import { batchText } from "../../../src/gateway/protocol/batch.ts";
import { match, MAX_QUOTE_CHARS, quote } from "../../../src/workers/backend/replies.ts";
import { batchOf, outputsOf } from "../../contract/backend.ts";

/** Letters, and the units that spoil a line. */
const unit = fc.constantFrom(
  "a",
  "bc",
  " ",
  "\n",
  "\r",
  "\u0000",
  "\u001b",
  "\u2028",
  "\u202e",
  "\ud800",
  "\udc00",
  "😀",
);

describe("match:", () => {
  test("the n-th output goes to the n-th task, only when the counts agree", () => {
    fc.assert(
      fc.property(fc.nat(64), fc.nat(64), (inputs, outputs) => {
        const batch = batchOf(Array.from({ length: inputs }, (_, index) => `${index}`));
        const texts = Array.from({ length: outputs }, (_, index) => `"${index}"`);
        const reply = match(batch, texts);
        if (inputs === outputs) assert.deepEqual(outputsOf(batch, reply), texts);
        else assert.equal(reply.kind, "unusable");
      }),
    );
  });

  test("a wrong count is said in numbers", () => {
    const counts: [inputs: number, outputs: number, message: string][] = [
      [64, 63, "worker returned 63 outputs for 64 inputs"],
      [1, 2, "worker returned 2 outputs for 1 input"],
      [2, 1, "worker returned 1 output for 2 inputs"],
      [1, 0, "worker returned 0 outputs for 1 input"],
    ];
    for (const [inputs, outputs, message] of counts) {
      const reply = match(batchOf(new Array<string>(inputs).fill("1")), new Array<string>(outputs).fill("1"));
      assert.deepEqual(reply, { kind: "unusable", message });
    }
  });

  test("a batch is told in its tasks' own texts", () => {
    assert.equal(
      batchText(["1.0", '{"a": 12345678901234567890}'], ""),
      '{"inputs":[1.0,{"a": 12345678901234567890}]}',
    );
    assert.equal(batchText(["1"], '{"k":2}'), '{"inputs":[1],"parameters":{"k":2}}');
  });

  test("a worker's words become one short printable line", () => {
    assert.equal(quote("  CUDA\r\n\tout of\u2028memory\u0000\u001b[31m "), "CUDA out of memory [31m");
    assert.equal(quote("right\u202eleft"), "rightleft");
    assert.equal(quote("x".repeat(300)), `${"x".repeat(199)}…`);
    fc.assert(
      fc.property(fc.array(unit, { maxLength: 900 }), (units) => {
        const text = units.join("");
        const line = quote(text);
        assert(line.length <= MAX_QUOTE_CHARS);
        assert.doesNotMatch(line, /[\p{Cc}\u2028\u2029]/u);
        assert(line.isWellFormed());
      }),
    );
  });
});
