/** What one request may become is bounded before anything is made of it, in every protocol. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { Refusal } from "../../../src/core/errors.ts";
import { scan } from "../../../src/core/json.ts";
import { splitArray } from "../../../src/core/json-split.ts";
import type { Drafts, RequestLimits, Unbatched } from "../../../src/gateway/protocol/protocol.ts";
import { protocols } from "../../../src/gateway/protocol/protocols.ts";
import { draftsOf, outputsOf } from "../../../src/gateway/protocol/oip-grpc.ts";
import { contentsOfRaw } from "../../../src/gateway/protocol/oip-proto.ts";
import { rawFromJson } from "../../../src/gateway/protocol/oip-tensors.ts";
import { ProtoWriter } from "../../../src/gateway/protocol/protobuf.ts";
import { drafts as oipDrafts, replied } from "./oip-stage.ts";
import { LIMITS } from "./spoken.ts";

const FEW: RequestLimits = { maxInputs: 3, maxBytes: 100 };

function read(path: string, body: string, limits: RequestLimits): Drafts | Unbatched {
  const routes = Object.values(protocols).flatMap((each) => each?.client.infer ?? []);
  const route = routes.find((each) => each.path === path);
  assert(route, path);
  return route.read({ names: { model: "m" }, body: Buffer.from(body), limits, header: () => undefined });
}

const refused =
  (code: string, words: RegExp) =>
  (error: unknown): boolean =>
    error instanceof Refusal && error.code === code && words.test(error.message);

const times = <T>(count: number, value: T): T[] => Array.from({ length: count }, () => value);
const list = (length: number, element: string): string => `[${times(length, element).join(",")}]`;

/** A body with so many inputs, in each form that a list of inputs has. */
const BODIES: [path: string, body: (inputs: number) => string][] = [
  ["/v1/embeddings", (n) => `{"input":${list(n, '"a"')}}`],
  ["/v1/embeddings", (n) => `{"input":${list(n, "[1]")}}`],
  ["/v1/completions", (n) => `{"prompt":${list(n, '"a"')}}`],
  ["/v1/completions", (n) => `{"prompt":${list(n, "[1,2]")}}`],
  ["/embed", (n) => `{"inputs":${list(n, '"a"')}}`],
  ["/embed_all", (n) => `{"inputs":${list(n, "[1]")}}`],
  ["/embed_sparse", (n) => `{"inputs":${list(n, '""')}}`],
  ["/predict", (n) => `{"inputs":${list(n, '["a"]')}}`],
  ["/rerank", (n) => `{"query":"q","texts":${list(n, '"a"')}}`],
  ["/", (n) => `{"query":"q","texts":${list(n, '"a"')}}`],
  ["/v1/models/{model}:predict", (n) => `{"instances":${list(n, "[]")}}`],
  ["/v2/models/{model}/infer", (n) => oip([{ shape: [n, 0], data: [] }])],
  ["/v2/models/{model}/infer", (n) => oip([{ shape: [n], data: times(n, 1) }])],
  ["/api/embed", (n) => `{"input":${list(n, '"a"')},"keep_alive":"1h"}`],
  ["/v2/embed", (n) => `{"texts":${list(n, '"a"')}}`],
  ["/v2/embed", (n) => `{"inputs":${list(n, "{}")}}`],
];

function oip(tensors: readonly object[], more: object = {}): string {
  const inputs = tensors.map((tensor, at) => ({ name: `t${at}`, datatype: "FP32", ...tensor }));
  return JSON.stringify({ inputs, ...more });
}

describe("maxInputs", () => {
  for (const [path, body] of BODIES) {
    test(`${path} ${body(1).slice(0, 40)}`, () => {
      const found = read(path, body(3), FEW);
      assert(!("unbatched" in found));
      assert.equal(found.inputs.length, 3);
      const words = /more than 3 inputs; send fewer|there are 4 rows; send at most 3/;
      assert.throws(() => read(path, body(4), FEW), refused("INVALID_REQUEST", words));
    });
  }

  test("a list is cut no further than to the first input too many", () => {
    const { elements } = splitArray(`[1,2,3,4,"not even looked at`, 2);
    assert.deepEqual(elements, ["1", "2", "3"]);
  });

  test("tokens are one input, however many", () => {
    const body = `{"input":[ ${"7, ".repeat(5000)}8 ]}`;
    const found = read("/v1/embeddings", body, FEW);
    assert(!("unbatched" in found));
    assert.equal(found.inputs.length, 1);
    assert.match(found.parameters, /\$tokens/);
  });

  test("a list of millions of numbers can be read", () => {
    const text = `{"input":[${"1,".repeat(8_500_000)}1]}`;
    assert.equal(scan(text).problem, undefined);
  });
});

describe("maxBytes", () => {
  for (const path of ["/rerank", "/"]) {
    test(`POST ${path} counts the query once for each text`, () => {
      const body = (query: number): string => JSON.stringify({ query: "q".repeat(query), texts: ["a", "b"] });
      // Two texts of 3 characters with their quotes, and the query twice.
      assert(!("unbatched" in read(path, body(45), FEW)));
      const words = /query of 48 characters with 2 texts makes inputs of 102 bytes; at most 100 are taken/;
      assert.throws(() => read(path, body(46), FEW), refused("PAYLOAD_TOO_LARGE", words));
    });
  }
});

describe("tensors of no bytes", () => {
  const rows = (error: unknown): boolean =>
    refused("INVALID_REQUEST", /65536 rows; send at most 2048/)(error);

  test("over HTTP their rows are counted before they are cut", () => {
    const tensors = Array.from({ length: 300 }, () => ({ shape: [65_536, 0], data: [] }));
    assert.throws(() => oipDrafts(oip(tensors)), rows);
    const bytes = tensors.map(({ shape }) => ({ shape, datatype: "BYTES", data: [] }));
    assert.throws(() => oipDrafts(oip(bytes)), rows);
  });

  test("rows of all tensors together are bounded, and tensors themselves", () => {
    const of = (count: number): string =>
      oip(Array.from({ length: count }, () => ({ shape: [2048, 0], data: [] })));
    assert.equal(oipDrafts(of(32)).inputs.length, 2048);
    assert.throws(() => oipDrafts(of(33)), refused("INVALID_REQUEST", /2048 rows of 33 tensors; at most/));
    const one = { shape: [1, 1], data: [0] };
    assert.equal(oipDrafts(oip(times(1024, one))).inputs.length, 1);
    assert.throws(() => oipDrafts(oip(times(1025, one))), refused("INVALID_REQUEST", /more than 1024/));
    const outputs = times(1025, { name: "y" });
    assert.throws(() => oipDrafts(oip([one], { outputs })), refused("INVALID_REQUEST", /more than 1024/));
  });

  test("over gRPC, too", () => {
    const flaw = (...tensors: Buffer[]): string | undefined =>
      draftsOf(Buffer.concat(tensors), () => ({}), LIMITS.maxInputs).flaw;
    const zero = (size: number): Buffer => tensorOf([size, 0]);
    assert.equal(flaw(zero(2048)), undefined);
    assert.equal(flaw(...times(150, zero(65_536))), "there are 65536 rows; send at most 2048 in one request");
    assert.match(flaw(...times(33, zero(2048)))!, /^the request has 2048 rows of 33 tensors; at most/);
    assert.match(flaw(zero(2), zero(65_536))!, /disagree in dimension 0.*: 2 and 65536/);
    assert.match(flaw(zero(2 ** 52))!, /rows; send at most/);
  });

  test("a model that takes a request as a whole gets it as one input", () => {
    const found = draftsOf(tensorOf([65_536, 0]), () => ({ alone: true }), 1);
    assert.equal(found.flaw ?? found.inputs.length, 1);
  });

  test("contents that stand in a tensor again and again are refused", () => {
    const again = (count: number): string | undefined => {
      const contents = Buffer.concat(times(count, Buffer.from([0x2a, 0])));
      return draftsOf(tensorOf([1, 0], contents)).flaw;
    };
    assert.equal(again(16), undefined);
    assert.match(again(17)!, /contents more than 16 times/);
  });

  test("a hundred thousand empty elements of BYTES are read and written", () => {
    const raw = rawFromJson(list(100_000, '""'), "BYTES");
    assert.equal(raw.length, 400_000);
    assert.equal(contentsOfRaw(raw, "BYTES").length, 200_000);
  });
});

describe("replies of no bytes", () => {
  const output = (rows: number): object => ({ name: "y", datatype: "FP32", shape: [rows, 0], data: [] });
  const reply = (count: number, rows: number): string | undefined => {
    const body = Buffer.from(JSON.stringify({ outputs: times(count, output(rows)) }));
    return replied({ status: 200, headers: {}, body }, rows).flaw;
  };

  test("over HTTP their rows are counted before they are cut", () => {
    assert.equal(reply(64, 1024), undefined);
    assert.match(reply(65, 1024)!, /^has 1024 rows of 65 tensors; at most/);
    assert.match(reply(1025, 1)!, /^has 1 rows of 1025 tensors; at most/);
  });

  test("over gRPC, too", () => {
    const bytes = (count: number, rows: number): Buffer => Buffer.concat(times(count, tensorOf([rows, 0])));
    assert.equal(outputsOf(bytes(64, 1024), 1024).flaw, undefined);
    assert.match(outputsOf(bytes(65, 1024), 1024).flaw!, /^has 1024 rows of 65 tensors; at most/);
    assert.match(outputsOf(bytes(1, 2 ** 40), 2).flaw!, /for 2 rows/);
    assert.equal(outputsOf(bytes(1, 2 ** 40), 1).flaw, undefined);
  });
});

/** A tensor of FP32 in a ModelInferRequest, or in a ModelInferResponse. */
function tensorOf(shape: readonly number[], more: Buffer = Buffer.alloc(0)): Buffer {
  const tensor = new ProtoWriter();
  tensor.string(1, "x");
  tensor.string(2, "FP32");
  tensor.packed(3, (into) => shape.forEach((dimension) => into.rawVarint(dimension)));
  const bytes = Buffer.concat([...tensor.parts(), more]);
  const message = new ProtoWriter();
  message.bytes(5, bytes);
  return Buffer.concat(message.parts());
}
