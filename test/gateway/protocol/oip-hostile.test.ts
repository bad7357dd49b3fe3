/** What is not a tensor, or not one for each row, is refused, whoever sent it. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { Refusal } from "../../../src/core/errors.ts";
import type { Outputs } from "../../../src/gateway/protocol/protocol.ts";
import { asked, drafts, read, refused, replied, worker } from "./oip-stage.ts";
import { HEADER, writeMessage } from "./servers/oip.ts";

describe("hostile requests", () => {
  const tensor = { name: "x", shape: [1, 2], datatype: "FP32", data: [1, 2] };
  const wrong = (change: object): string => JSON.stringify({ inputs: [{ ...tensor, ...change }] });

  test("each is refused with a word that helps", () => {
    const cases: [body: Buffer | string, words: RegExp, headers?: Record<string, string>][] = [
      ["", /not valid JSON/],
      ["[]", /JSON object/],
      ["{}", /"inputs" must be an array/],
      ['{"inputs":[]}', /at least one/],
      ['{"inputs":[1]}', /objects/],
      ['{"inputs":[{}]}', /an input has no "name"/],
      [wrong({ shape: [1, 3] }), /input "x" holds 2 values, but its shape says 3/],
      [wrong({ shape: [-1, 2] }), /dimension of -1/],
      [wrong({ shape: [1.5] }), /shape/],
      [wrong({ shape: Array.from({ length: 40 }, () => 1) }), /shape/],
      [wrong({ shape: [2 ** 40, 0], data: [] }), /rows; send at most 2048/],
      [wrong({ shape: [1, 2 ** 30, 2 ** 30] }), /too large/],
      [wrong({ shape: [1, ...Array.from({ length: 25 }, () => 2 ** 52), 0], data: [] }), /too large/],
      [wrong({ shape: "x" }), /no "shape"/],
      [wrong({ datatype: "FP7" }), /not known/],
      [wrong({ datatype: 3 }), /"datatype"/],
      [wrong({ data: undefined }), /neither "data" nor/],
      [wrong({ data: 5 }), /no array/],
      [wrong({ data: [{}, {}] }), /object/],
      [wrong({ data: ["1", 2] }), /input "x" holds a string, but is FP32/],
      [wrong({ data: [1, null] }), /holds true, false or null, but is FP32/],
      [wrong({ data: [false, 1] }), /holds true, false or null/],
      [wrong({ datatype: "BOOL", data: [null, true] }), /but is BOOL/],
      [wrong({ parameters: 5 }), /"parameters" that is no object/],
      [wrong({ parameters: { binary_data_size: 8 } }), /"data" and a binary_data_size/],
      [wrong({ data: undefined, parameters: { binary_data_size: 8 } }), /only 0 bytes are left/],
      [wrong({ data: undefined, parameters: { binary_data_size: -1 } }), /no number of bytes/],
      [JSON.stringify({ inputs: [tensor], id: 5 }), /"id" must be a string/],
      [JSON.stringify({ inputs: [tensor], outputs: {} }), /"outputs" must be an array/],
      [JSON.stringify({ inputs: [tensor], outputs: [3] }), /"outputs" must hold objects/],
      ['{"inputs":[],"inputs":[]}', /stands twice/],
      [JSON.stringify({ inputs: [tensor] }), /Inference-Header-Content-Length/, { [HEADER]: "99999" }],
      [JSON.stringify({ inputs: [tensor] }), /Inference-Header-Content-Length/, { [HEADER]: "-1" }],
      [
        `${JSON.stringify({ inputs: [tensor] })}XX`,
        /2 bytes stand behind/,
        { [HEADER]: String(wrong({}).length) },
      ],
      [Buffer.from([0xff, 0xfe]), /not UTF-8/],
    ];
    for (const [body, words, headers] of cases) {
      assert.throws(() => read(asked(body, headers)), refused(words), String(body).slice(0, 80));
    }
  });

  test("bytes that do not fit their shape are refused", () => {
    const { body, headers } = writeMessage(
      {},
      [{ ...tensor, data: undefined, raw: Buffer.alloc(9) } as never],
      "inputs",
    );
    assert.throws(
      () => read(asked(body, { ...headers })),
      refused(/9 bytes, but FP32 of shape \[1,2\] needs 8/),
    );
  });

  test("whatever bytes come, the worst is a refusal", () => {
    const pieces = fc.constantFrom(
      '{"inputs":[',
      '{"name":"x"',
      ',"shape":[1]',
      ',"datatype":"FP32"',
      ',"data":[1]',
      "}",
      "]",
      "}",
      ",",
      "\u0000",
      '"',
      "\\",
    );
    fc.assert(
      fc.property(fc.array(pieces, { maxLength: 12 }), fc.option(fc.nat(80)), (parts, length) => {
        const headers = length === null ? {} : { [HEADER]: String(length) };
        try {
          read(asked(parts.join(""), headers));
        } catch (error) {
          assert.ok(error instanceof Refusal, String(error));
        }
      }),
    );
  });
});

describe("workers that misbehave", () => {
  const reply = (body: unknown, headers: Record<string, string> = {}, rows = 2): Outputs =>
    replied(
      { status: 200, headers, body: Buffer.from(typeof body === "string" ? body : JSON.stringify(body)) },
      rows,
    );
  const output = { name: "y", datatype: "FP32", shape: [2, 1], data: [1, 2] };

  test("what is not one output for each row is nobody's", () => {
    assert.match(reply("nonsense").flaw!, /not JSON/);
    assert.match(
      reply('{"outputs":[{"name":"y","datatype":"FP32","shape":[2],"data":[NaN,1]}]}').flaw!,
      /not JSON/,
    );
    assert.match(reply([]).flaw!, /not an object/);
    assert.match(reply({}).flaw!, /no "outputs"/);
    assert.match(reply({ outputs: [] }).flaw!, /no outputs/);
    assert.match(reply({ outputs: [3] }).flaw!, /no object/);
    assert.match(
      reply({ outputs: [{ ...output, data: [1, 2, 3] }] }).flaw!,
      /holds 3 values, but its shape says 2/,
    );
    assert.match(reply({ outputs: [{ ...output, data: [1] }] }).flaw!, /holds 1 values/);
    assert.match(reply({ outputs: [{ ...output, data: undefined }] }).flaw!, /no "data"/);
    assert.match(reply({ outputs: [{ ...output, name: 3 }] }).flaw!, /"name"/);
    assert.match(
      reply('{"outputs":[{"name":"y","datatype":"FP32","shape":[2],"data":[1e999,1]}]}').flaw!,
      /range/,
    );
    const size = { ...output, data: undefined, parameters: { binary_data_size: 8 } };
    const head = JSON.stringify({ outputs: [size] });
    assert.match(reply(head).flaw!, /only 0 bytes/);
    assert.match(reply(`${head}1234567`, { [HEADER]: String(head.length) }).flaw!, /only 7 bytes/);
    assert.match(reply(`${head}123456789`, { [HEADER]: String(head.length) }).flaw!, /1 bytes behind/);
    assert.match(reply(head, { [HEADER]: "12345" }).flaw!, /Inference-Header/);
  });

  test("nesting beside the outputs is no recursion, and no caller gets a key twice", () => {
    const deep = "[".repeat(200_000) + "]".repeat(200_000);
    const one = JSON.stringify(output).slice(0, -1);
    for (const text of [
      `{"parameters":{"a":${deep}},"outputs":[${one}}]}`,
      `{"outputs":[${one},"parameters":{"a":${deep}}}]}`,
    ]) {
      assert.match(reply(text).flaw!, /nested deeper than 64/);
    }
    assert.match(reply(`{"outputs":[${one},"parameters":{"a":1,"a":2}}]}`).flaw!, /a key twice/);
    assert.match(reply(`{"outputs":[${one},"parameters":{"a":1e999}}]}`).flaw!, /range/);
  });

  test("a reply for all rows together asks for one task at a time", () => {
    for (const shape of [[1, 1], [3, 1], []]) {
      const { flaw, inseparable } = reply({ outputs: [{ ...output, shape }] }) as {
        flaw: string;
        inseparable: boolean;
      };
      assert.equal(inseparable, true, flaw);
    }
  });

  test("rows that disagree, or have no row of their own, make no answer", () => {
    const body = '{"inputs":[{"name":"x","shape":[2],"datatype":"FP32","data":[1,2]}]}';
    const row = (shape: number[], data: number[], name = "y"): string =>
      JSON.stringify({ outputs: [{ name, datatype: "FP32", shape, data }] });
    const failing = (first: string, second: string, words: RegExp): void =>
      assert.throws(
        () => drafts(body).render([first, second], "m"),
        (error) => error instanceof Refusal && error.code === "INFERENCE_FAILED" && words.test(error.message),
      );
    failing(row([1, 1], [1]), row([1, 2], [1, 2]), /different shapes/);
    failing(row([1, 1], [1]), row([1, 1], [1], "z"), /different shapes/);
    failing(row([2, 1], [1, 2]), row([2, 1], [1, 2]), /not one for each row/);
    failing(row([1, 1], [1]), row([1, 1], [1, 2]), /another size/);
    failing("5", "5", /no tensors/);
    failing('{"of":1}', '{"of":1}', /no tensors/);
  });

  test("tasks that were made elsewhere are refused alone", () => {
    const form = '{"inputs":[{"datatype":"FP32","name":"x","shape":[2]}]}';
    const binary = '{"binary":true,"inputs":[{"datatype":"FP32","name":"x","shape":[1]}]}';
    const cases: [inputs: string[], parameters: string][] = [
      [['"a text"'], ""],
      [["[[1,2]]"], '{"temperature":1}'],
      [["[[1,2]]"], '{"inputs":5}'],
      [["[[1,2]]"], '{"inputs":[5]}'],
      [["[[1,2,3]]"], form],
      [["[[1,2]]", "[[1]]"], form],
      [["[[[],[],[1]]]"], form],
      [["[[1,2],[3]]"], form],
      [["[[{},2]]"], form],
      [["5"], form],
      [['["AAAA"]'], binary],
      [['["!!!!!!=="]'], binary],
      [["[[1]]"], binary],
    ];
    for (const [inputs, parameters] of cases) {
      assert.ok(worker.call(inputs, parameters, "toy").flaw, inputs.join());
    }
  });
});
