/** Rows of different length in one batch: padded for the worker, cut back for each caller. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { canonical } from "../../../src/core/json.ts";
import { estimateTokens } from "../../../src/core/weight.ts";
import { callOf, draftsOf, outputsOf } from "../../../src/gateway/protocol/oip-grpc.ts";
import { type Pad, PadMemory } from "../../../src/gateway/protocol/oip-pad.ts";
import { cutFor, readRow } from "../../../src/gateway/protocol/oip-task.ts";
import { jsonFromRaw, rawFromJson } from "../../../src/gateway/protocol/oip-tensors.ts";
import type { Outputs, WorkerCall } from "../../../src/gateway/protocol/protocol.ts";
import { drafts, refused, worker } from "./oip-stage.ts";
import { type InferResponse, readRequest, requestBytes, responseBytes } from "./oip-service.ts";
import { exactly, HEADER, readMessage, type Sent, type Tensor, SIZES, writeMessage } from "./servers/oip.ts";

const AXIS_1: Pad = { axis: 1, value: 0 };
const memory = (): PadMemory => new PadMemory(() => {});

function product(shape: readonly number[]): number {
  return shape.reduce((all, dimension) => all * dimension, 1);
}

function ids(...rows: readonly (readonly number[])[]): Sent {
  const data = rows.flat().map((id) => exactly(String(id)));
  const tensor = { name: "ids", datatype: "INT64", shape: [rows.length, rows[0]!.length], data };
  return writeMessage({}, [tensor], "inputs");
}

interface Task {
  readonly input: string;
  readonly parameters: string;
}

/** The tasks of requests, which must be able to share a batch. */
function tasks(pad: Pad, ...requests: readonly Sent[]): { inputs: string[]; parameters: string } {
  const all = requests.flatMap(({ body, headers }): Task[] => {
    const { inputs, parameters } = drafts(body, headers, { pad });
    assert.equal(canonical(parameters), parameters);
    return inputs.map((input) => ({ input, parameters }));
  });
  assert.equal(new Set(all.map(({ parameters }) => parameters)).size, 1);
  return { inputs: all.map(({ input }) => input), parameters: all[0]!.parameters };
}

function call({ inputs, parameters }: ReturnType<typeof tasks>, plain = false): WorkerCall {
  const made = worker.call(inputs, parameters, "toy", plain);
  assert.equal(made.flaw, undefined);
  return made;
}

function sent({ body, headers = {} }: WorkerCall): readonly Tensor[] {
  return readMessage(Buffer.from(body as string), headers[HEADER], "inputs").tensors;
}

/** A reply with these tensors. */
function reply(
  tensors: readonly Tensor[],
  { inputs, parameters }: ReturnType<typeof tasks>,
  known?: PadMemory,
): Outputs {
  const { body, headers } = writeMessage({ model_name: "toy" }, tensors, "outputs");
  return worker.outputs({ header: (name) => headers[name], body }, inputs, parameters, known);
}

/** Each row's first output: its shape and its values. */
function firsts({ outputs, flaw }: Outputs): readonly (readonly [readonly number[], string])[] {
  assert.equal(flaw, undefined);
  return outputs.map((output) => {
    const { shape, data, raw, datatype } = readRow(output).outputs[0]!;
    return [shape, data ?? jsonFromRaw(Buffer.from(raw, "base64"), datatype)];
  });
}

const numbers = (...values: readonly number[]): NonNullable<Tensor["data"]> =>
  values.map((value) => exactly(String(value)));

describe("a padded batch", () => {
  test("rows are filled up to the longest, and each is cut back to its own", () => {
    const batch = tasks({ ...AXIS_1, outputs: ["y"] }, ids([1, 2, 3]), ids([4]), ids([5, 6], [7, 8]));
    assert.deepEqual(batch.inputs, [
      '{"$length":3,"row":[[1,2,3]]}',
      '{"$length":1,"row":[[4]]}',
      '{"$length":2,"row":[[5,6]]}',
      '{"$length":2,"row":[[7,8]]}',
    ]);
    assert.equal(
      batch.parameters,
      '{"inputs":[{"datatype":"INT64","name":"ids","shape":[-1]}],"pad":{"axis":1,"outputs":["y"],"value":0}}',
    );
    assert.deepEqual(batch.inputs.map(estimateTokens), [3, 1, 2, 2]);
    const [tensor, ...others] = sent(call(batch));
    assert.deepEqual(others, []);
    assert.deepEqual(tensor!.shape, [4, 3]);
    assert.equal(JSON.stringify(tensor!.data), "[1,2,3,4,0,0,5,6,0,7,8,0]");
    const y = { name: "y", datatype: "INT64", shape: [4, 3], data: tensor!.data! };
    assert.deepEqual(firsts(reply([y], batch)), [
      [[1, 3], "[1,2,3]"],
      [[1, 1], "[4]"],
      [[1, 2], "[5,6]"],
      [[1, 2], "[7,8]"],
    ]);
  });

  test("lengths are rounded up to a class, also of one row; longer ones are not", () => {
    const pad = { ...AXIS_1, classes: [4, 8], outputs: [] };
    const shapeOf = (...lengths: readonly number[]): readonly number[] =>
      sent(call(tasks(pad, ...lengths.map((length) => ids(Array(length).fill(1))))))[0]!.shape;
    assert.deepEqual(shapeOf(1), [1, 4]);
    assert.deepEqual(shapeOf(2, 4), [2, 4]);
    assert.deepEqual(shapeOf(2, 5, 1), [3, 8]);
    assert.deepEqual(shapeOf(2, 9), [2, 9]);
  });

  test("the lengths are an input of shape [rows, 1], INT32 beside INT32 and INT64 beside anything else", () => {
    const pad = { ...AXIS_1, lengthsInput: "lengths" };
    const made = sent(call(tasks(pad, ids([1, 2]), ids([3]))))[1]!;
    assert.deepEqual([made.name, made.datatype, made.shape], ["lengths", "INT64", [2, 1]]);
    assert.equal(JSON.stringify(made.data), "[2,1]");
    const small = (length: number): Sent =>
      writeMessage(
        {},
        [{ name: "ids", datatype: "INT32", shape: [1, length], raw: Buffer.alloc(4 * length, 1) }],
        "inputs",
      );
    const raw = sent(call(tasks(pad, small(2), small(5))))[1]!;
    assert.deepEqual(
      [raw.datatype, raw.shape, raw.raw!.toString("hex")],
      ["INT32", [2, 1], "0200000005000000"],
    );
  });

  test("a caller that sends the lengths itself keeps its own", () => {
    const pad = { ...AXIS_1, lengthsInput: "lengths" };
    const own = (length: number, shape: readonly number[]): Sent =>
      writeMessage(
        {},
        [
          {
            name: "ids",
            datatype: "INT64",
            shape: [1, length],
            data: numbers(...Array<number>(length).fill(1)),
          },
          { name: "lengths", datatype: "INT32", shape, data: numbers(-7) },
        ],
        "inputs",
      );
    for (const shape of [[1, 1], [1]]) {
      const tensors = sent(call(tasks(pad, own(3, shape), own(2, shape))));
      assert.deepEqual(
        tensors.map(({ name, shape: made }) => [name, made]),
        [
          ["ids", [2, 3]],
          ["lengths", [2, ...shape.slice(1)]],
        ],
      );
      assert.equal(JSON.stringify(tensors[1]!.data), "[-7,-7]");
    }
  });

  test("masks are filled with 0, whatever the padding token is", () => {
    const both = (length: number): Sent =>
      writeMessage(
        {},
        ["input_ids", "attention_mask", "Padding_Mask"].map((name) => ({
          name,
          datatype: "INT64",
          shape: [1, length],
          data: numbers(...Array<number>(length).fill(5)),
        })),
        "inputs",
      );
    const [tokens, ...masks] = sent(call(tasks({ axis: 1, value: 1 }, both(1), both(3))));
    assert.equal(JSON.stringify(tokens!.data), "[5,1,1,5,5,5]");
    for (const mask of masks) assert.equal(JSON.stringify(mask.data), "[5,0,0,5,5,5]");
  });

  test("inputs without the dimension, BYTES and those not named keep their shape", () => {
    const mixed = (length: number, words: readonly string[], scalars: number): Sent =>
      writeMessage(
        {},
        [
          {
            name: "ids",
            datatype: "INT64",
            shape: [1, length],
            data: numbers(...Array<number>(length).fill(1)),
          },
          { name: "user", datatype: "INT64", shape: [1], data: numbers(9) },
          { name: "words", datatype: "BYTES", shape: [1, words.length], data: words },
          {
            name: "knobs",
            datatype: "FP32",
            shape: [1, scalars],
            data: numbers(...Array<number>(scalars).fill(2)),
          },
        ],
        "inputs",
      );
    const pad = { ...AXIS_1, inputs: ["ids"] };
    const tensors = sent(call(tasks(pad, mixed(4, ["a", "b"], 1), mixed(2, ["c", "d"], 1))));
    assert.deepEqual(
      tensors.map(({ shape }) => shape),
      [[2, 4], [2], [2, 2], [2, 1]],
    );
    assert.deepEqual(tensors[2]!.data, ["a", "b", "c", "d"]);
    const parametersOf = (...given: Parameters<typeof mixed>): string =>
      tasks(pad, mixed(...given)).parameters;
    assert.equal(parametersOf(4, ["a"], 1), parametersOf(9, ["b"], 1));
    assert.notEqual(parametersOf(4, ["a"], 1), parametersOf(4, ["a", "b"], 1));
    assert.notEqual(parametersOf(4, ["a"], 1), parametersOf(4, ["a"], 2));
    // Nothing to pad: as without it.
    const text = writeMessage(
      {},
      [{ name: "t", datatype: "BYTES", shape: [1, 2], data: ["a", "b"] }],
      "inputs",
    );
    assert.deepEqual(tasks(AXIS_1, text), tasks({ ...AXIS_1, axis: 5 }, text));
    assert.deepEqual(tasks(AXIS_1, text).inputs, ['[["a","b"]]']);
  });

  test("a model that takes one task at a time is not padded", () => {
    const { body, headers } = ids([1, 2]);
    const whole = drafts(body, headers, { pad: AXIS_1, alone: true });
    assert.deepEqual(whole.inputs, ["[[1,2]]"]);
    assert.doesNotMatch(whole.parameters, /pad/);
  });
});

interface Case {
  readonly datatype: string;
  readonly axis: number;
  readonly around: readonly number[];
  readonly lengths: readonly number[];
  readonly value: number;
  readonly classes: readonly number[] | undefined;
  readonly seed: number;
}

const cases = fc.record({
  datatype: fc.constantFrom(...Object.keys(SIZES)),
  axis: fc.integer({ min: 1, max: 3 }),
  around: fc.array(fc.integer({ min: 1, max: 3 }), { minLength: 3, maxLength: 3 }),
  lengths: fc.array(fc.integer({ min: 0, max: 9 }), { minLength: 1, maxLength: 6 }),
  value: fc.constantFrom(0, 1),
  classes: fc.option(fc.constant([2, 5, 8]), { nil: undefined }),
  seed: fc.integer({ min: 0, max: 2 ** 31 }),
});

/** A row's shape: its length stands at `axis - 1`. */
function rowShape({ axis, around }: Case, length: number): number[] {
  return [...around.slice(0, axis - 1), length, ...around.slice(axis - 1)];
}

/** Values that JSON can say, all different from row to row. */
function rowRaw(given: Case, row: number): Buffer {
  const { datatype, lengths, seed } = given;
  const values = Array.from({ length: product(rowShape(given, lengths[row]!)) }, (_, at) => {
    const value = (seed + 31 * row + 7 * at) % 120;
    if (datatype === "BOOL") return value & 1;
    if (/^U?INT/.test(datatype)) return value;
    return value / 8;
  });
  if (datatype !== "BF16") return rawFromJson(JSON.stringify(values), datatype);
  const raw = Buffer.alloc(2 * values.length);
  values.forEach((value, at) => rawFromJson(`[${value}]`, "FP32").copy(raw, 2 * at, 2));
  return raw;
}

/** What one row must look like at the worker, element by element. */
function paddedRaw(given: Case, row: number, padded: number): Buffer {
  const { datatype, lengths, value, axis } = given;
  const size = SIZES[datatype]!;
  const own = rowRaw(given, row);
  const fill =
    datatype === "BF16" ? rawFromJson(`[${value}]`, "FP32").subarray(2) : rawFromJson(`[${value}]`, datatype);
  const shape = rowShape(given, padded);
  const inner = product(shape.slice(axis));
  const parts: Buffer[] = [];
  for (let at = 0; at < product(shape); at++) {
    const [block, place, rest] = [
      Math.floor(at / (padded * inner)),
      Math.floor(at / inner) % padded,
      at % inner,
    ];
    const from = ((block * lengths[row]! + place) * inner + rest) * size;
    parts.push(place < lengths[row]! ? own.subarray(from, from + size) : fill);
  }
  return Buffer.concat(parts);
}

function paddedTo({ lengths, classes = [] }: Case): number {
  const longest = Math.max(...lengths);
  return classes.find((each) => each >= longest) ?? longest;
}

function padIn(given: Case): Pad {
  const { axis, value, classes } = given;
  return { axis, value, classes, outputs: ["y"], lengthsInput: "lengths" };
}

describe("property: padded, echoed and cut is what it was", () => {
  const rowsOf = (given: Case): readonly { shape: number[]; raw: Buffer }[] =>
    given.lengths.map((length, row) => ({ shape: [1, ...rowShape(given, length)], raw: rowRaw(given, row) }));

  const http = (given: Case, form: "json" | "binary" | "plain"): void => {
    const { datatype, lengths } = given;
    const rows = rowsOf(given);
    const batch = tasks(
      padIn(given),
      ...rows.map(({ shape, raw }) => {
        const data = form === "json" ? dataOf(raw, datatype) : { raw };
        return writeMessage({}, [{ name: "x", datatype, shape, ...data }], "inputs");
      }),
    );
    const [x, told] = sent(call(batch, form === "plain"));
    const padded = paddedTo(given);
    assert.deepEqual(x!.shape, [lengths.length, ...rowShape(given, padded)]);
    const bytes = x!.raw ?? rawFromJson(JSON.stringify(x!.data), datatype);
    assert.deepEqual(bytes, Buffer.concat(lengths.map((_, row) => paddedRaw(given, row, padded))));
    assert.deepEqual(told!.shape, [lengths.length, 1]);
    const read = told!.raw ?? rawFromJson(JSON.stringify(told!.data), told!.datatype);
    assert.deepEqual(read, rawFromJson(JSON.stringify(lengths), told!.datatype));
    const { outputs, flaw } = reply([{ ...x!, name: "y", parameters: {} }], batch);
    assert.equal(flaw, undefined);
    outputs.forEach((output, row) => {
      const [y] = readRow(output).outputs;
      assert.deepEqual(y!.shape, rows[row]!.shape);
      const own = y!.data === undefined ? Buffer.from(y!.raw, "base64") : rawFromJson(y!.data, datatype);
      assert.deepEqual(own, rows[row]!.raw);
    });
  };

  const dataOf = (raw: Buffer, datatype: string): { data: NonNullable<Tensor["data"]> } => {
    const values = JSON.parse(jsonFromRaw(raw, datatype)) as (number | boolean)[];
    return { data: values.map((value) => (typeof value === "boolean" ? value : exactly(String(value)))) };
  };

  test("over HTTP as bytes", () =>
    fc.assert(
      fc.property(cases, (given) => http(given, "binary")),
      { numRuns: 400 },
    ));
  for (const form of ["json", "plain"] as const) {
    test(`over HTTP as JSON (${form})`, () => {
      const possible = cases.filter(({ datatype }) => datatype !== "BF16");
      fc.assert(
        fc.property(possible, (given) => http(given, form)),
        { numRuns: 400 },
      );
    });
  }

  test("over gRPC, raw and typed", () => {
    fc.assert(
      fc.property(cases, fc.boolean(), (given, wishesTyped) => {
        const { datatype, lengths } = given;
        const typed =
          wishesTyped && !datatype.endsWith("16") && !["BOOL", "INT8", "UINT8"].includes(datatype);
        const rows = rowsOf(given);
        const all = rows.map(({ shape, raw }) => {
          const tensor = { name: "x", datatype, shape };
          const contents = typed ? { contents: contentsOf(raw, datatype) } : {};
          const bytes = requestBytes({
            model_name: "m",
            inputs: [{ ...tensor, ...contents }],
            ...(!typed && { raw_input_contents: [raw] }),
          });
          const read = draftsOf(bytes, () => ({ pad: padIn(given) }));
          assert.ok(read.flaw === undefined, String(read.flaw));
          return read;
        });
        const { parameters } = all[0]!;
        assert.ok(all.every((each) => each.parameters === parameters && each.inputs.length === 1));
        const inputs = all.map((each) => each.inputs[0]!);
        const made = callOf({ id: "b", inputs, parameters }, "m", "");
        assert.ok(made.flaw === undefined, String(made.flaw));
        const request = readRequest(Buffer.concat(made.parts));
        const [x, told] = request.inputs;
        const padded = paddedTo(given);
        assert.deepEqual(x!.shape.map(Number), [lengths.length, ...rowShape(given, padded)]);
        assert.deepEqual(told!.shape.map(Number), [lengths.length, 1]);
        const wanted = Buffer.concat(lengths.map((_, row) => paddedRaw(given, row, padded)));
        if (!typed) assert.deepEqual(request.raw_input_contents![0], wanted);
        const response: InferResponse = { model_name: "m", outputs: [{ ...x!, name: "y" }] };
        const echoed = typed ? response : { ...response, raw_output_contents: [wanted] };
        const read = outputsOf(responseBytes(echoed), lengths.length, cutFor(inputs, parameters));
        assert.ok(read.flaw === undefined, String(read.flaw));
        read.outputs.forEach((output, row) => {
          const [y] = readRow(output).outputs;
          assert.deepEqual(y!.shape, rows[row]!.shape);
          assert.deepEqual(Buffer.from(y!.raw, "base64"), rows[row]!.raw);
        });
      }),
      { numRuns: 400 },
    );
  });

  function contentsOf(raw: Buffer, datatype: string): object {
    const values = JSON.parse(jsonFromRaw(raw, datatype)) as number[];
    const field = { INT32: "int", UINT32: "uint" }[datatype] ?? datatype.toLowerCase();
    return { [`${field}_contents`]: values };
  }

  test("JSON clients of a gRPC worker", () => {
    const batch = tasks(AXIS_1, ids([1, 2, 3]), ids([4]));
    const made = callOf({ id: "b", ...batch }, "m", "");
    assert.ok(made.flaw === undefined);
    const { inputs, raw_input_contents: raws } = readRequest(Buffer.concat(made.parts));
    assert.deepEqual(inputs[0]!.shape.map(Number), [2, 3]);
    assert.equal(jsonFromRaw(raws![0]!, "INT64"), "[1,2,3,4,0,0]");
  });

  test("BYTES that follow the padded length are cut, too", () => {
    const batch = tasks({ ...AXIS_1, outputs: ["tags"] }, ids([1, 2]), ids([3]));
    const tags = { name: "tags", datatype: "BYTES", shape: [2, 2, 2] };
    const texts = ["a,", 'b"', "", "é", "c", "dd", "x", "y"];
    const raw = rawFromJson(JSON.stringify(texts), "BYTES");
    for (const form of [{ data: texts }, { raw }]) {
      assert.deepEqual(firsts(reply([{ ...tags, ...form }], batch)), [
        [[1, 2, 2], '["a,","b\\"","","é"]'],
        [[1, 1, 2], '["c","dd"]'],
      ]);
    }
  });
});

test("BYTES behind another dimension are cut in each of its parts", () => {
  const request = (length: number): Sent =>
    writeMessage(
      {},
      [{ name: "x", datatype: "INT8", shape: [1, 1, length], raw: Buffer.alloc(length) }],
      "inputs",
    );
  const batch = tasks({ axis: 2, value: 0, outputs: ["tags"] }, request(1), request(2));
  const texts = ["a", "-", "b", "-", "c", "d", "e", "f"];
  const tags = { name: "tags", datatype: "BYTES", shape: [2, 2, 2] };
  for (const form of [{ data: texts }, { raw: rawFromJson(JSON.stringify(texts), "BYTES") }]) {
    assert.deepEqual(firsts(reply([{ ...tags, ...form }], batch)), [
      [[1, 2, 1], '["a","b"]'],
      [[1, 2, 2], '["c","d","e","f"]'],
    ]);
  }
});

test("BOOL is padded with true and false in JSON", () => {
  const bools = (...data: readonly boolean[]): Sent =>
    writeMessage({}, [{ name: "on", datatype: "BOOL", shape: [1, data.length], data }], "inputs");
  for (const value of [0, 1]) {
    const [on] = sent(call(tasks({ axis: 1, value }, bools(true), bools(false, true))));
    assert.deepEqual(on!.data, [true, value === 1, false, true]);
  }
});

describe("which outputs are cut", () => {
  const y = (rows: number, ...shape: readonly number[]): Tensor => ({
    name: "y",
    datatype: "FP32",
    shape: [rows, ...shape],
    raw: Buffer.alloc(4 * rows * product(shape)),
  });
  const shapes = (read: Outputs): readonly (readonly number[])[] => firsts(read).map(([shape]) => shape);
  const batchOf = (pad: Pad, ...lengths: readonly number[]): ReturnType<typeof tasks> =>
    tasks(pad, ...lengths.map((length) => ids(Array(length).fill(1))));

  test("named ones must have the padded length, and only they are cut", () => {
    const pad = { ...AXIS_1, outputs: ["y"] };
    const batch = batchOf(pad, 3, 8);
    assert.deepEqual(shapes(reply([y(2, 8, 5)], batch)), [
      [1, 3, 5],
      [1, 8, 5],
    ]);
    for (const wrong of [y(2, 7, 5), y(2, 9, 5), y(2, 5, 8), y(2)]) {
      const { flaw, divide } = reply([wrong], batch);
      assert.match(
        flaw!,
        /^has an output "y" of shape \[2.*\]; its dimension 1 should be 8, the padded length$/,
      );
      assert.notEqual(divide, true);
    }
    // Another output happens to have that dimension.
    assert.deepEqual(shapes(reply([{ ...y(2, 8), name: "pooled" }], batch)), [
      [1, 8],
      [1, 8],
    ]);
    // Nothing was padded: any shape, as without padding.
    assert.deepEqual(shapes(reply([y(1, 4)], batchOf(pad, 8))), [[1, 4]]);
    assert.deepEqual(shapes(reply([y(2, 4)], batchOf(pad, 8, 8))), [
      [1, 4],
      [1, 4],
    ]);
  });

  test("none: every output is as the worker gave it", () => {
    assert.deepEqual(shapes(reply([y(2, 8)], batchOf({ ...AXIS_1, outputs: [] }, 3, 8))), [
      [1, 8],
      [1, 8],
    ]);
  });

  test("by itself: only what was equal to two padded lengths; until then the batch is divided", () => {
    const known = memory();
    const first = reply([y(2, 8)], batchOf(AXIS_1, 3, 8), known);
    assert.equal(first.divide, true);
    assert.match(
      first.flaw,
      /"y" of shape \[2,8\]: whether its dimension 1 is the padded length is not known/,
    );
    assert.equal(reply([y(2, 8)], batchOf(AXIS_1, 4, 8), known).divide, true);
    // A row alone is not cut, and teaches.
    assert.deepEqual(shapes(reply([y(1, 3)], batchOf(AXIS_1, 3), known)), [[1, 3]]);
    assert.deepEqual(shapes(reply([y(2, 8)], batchOf(AXIS_1, 3, 8), known)), [
      [1, 3],
      [1, 8],
    ]);
    // From now on another length is a worker's mistake, and changes nothing.
    assert.match(reply([y(2, 7)], batchOf(AXIS_1, 3, 8), known).flaw!, /should be 8, the padded length/);
    assert.deepEqual(shapes(reply([y(1, 512)], batchOf(AXIS_1, 600), known)), [[1, 512]]);
    assert.deepEqual(shapes(reply([y(2, 9)], batchOf(AXIS_1, 1, 9), known)), [
      [1, 1],
      [1, 9],
    ]);
  });

  test("by itself: a fixed dimension is never cut, also where it equals the padded length", () => {
    const warnings: string[] = [];
    const known = new PadMemory((message) => warnings.push(message));
    // Nothing is known: it could follow.
    assert.equal(reply([y(2, 16)], batchOf(AXIS_1, 3, 16), known).divide, true);
    for (const lengths of [[3], [16], [3, 16], [3, 8], [5], [2, 2, 20], [16, 15]])
      assert.deepEqual(
        shapes(reply([y(lengths.length, 16)], batchOf(AXIS_1, ...lengths), known)),
        lengths.map(() => [1, 16]),
      );
    assert.deepEqual(warnings, []);
  });

  test("by itself: a dimension that equals the padded length now and then is not cut, and said once", () => {
    const warnings: string[] = [];
    const known = new PadMemory((message) => warnings.push(message));
    reply([y(1, 2)], batchOf(AXIS_1, 5), known);
    for (const length of [3, 4, 6, 7])
      assert.equal(reply([y(2, length)], batchOf(AXIS_1, 1, length), known).divide, true);
    assert.equal(warnings.length, 1);
    assert.match(warnings[0]!, /the output "y" has the padded length in some batches and less in others/);
  });

  test("outputs are told apart by name and version", () => {
    const known = memory();
    const versioned = (length: number, version: string): ReturnType<typeof tasks> => {
      const { body, headers } = ids(Array(length).fill(1));
      const { inputs, parameters } = drafts(body, headers, { pad: AXIS_1, names: { model: "toy", version } });
      return { inputs: [...inputs], parameters };
    };
    const both = (length: number, version: string): ReturnType<typeof tasks> => {
      const [one, other] = [versioned(1, version), versioned(length, version)];
      assert.equal(one.parameters, other.parameters);
      return { ...one, inputs: [...one.inputs, ...other.inputs] };
    };
    for (const length of [3, 4]) reply([y(1, length)], versioned(length, "1"), known);
    assert.equal(reply([y(2, 5)], both(5, "1"), known).divide, undefined);
    assert.equal(reply([y(2, 5)], both(5, "2"), known).divide, true);
    assert.equal(reply([{ ...y(2, 5), name: "z" }], both(5, "1"), known).divide, true);
  });
});

describe("what is refused", () => {
  const request = (
    ...tensors: readonly (readonly [name: string, datatype: string, shape: number[]])[]
  ): Sent =>
    writeMessage(
      {},
      tensors.map(([name, datatype, shape]) => ({
        name,
        datatype,
        shape,
        data: numbers(...Array<number>(product(shape)).fill(1)),
      })),
      "inputs",
    );
  const refuses = (sentBody: Sent, pad: Pad, why: RegExp): void =>
    assert.throws(() => drafts(sentBody.body, sentBody.headers, { pad }), refused(why));

  test("inputs that disagree in the padded dimension", () => {
    const odd = request(["ids", "INT64", [1, 3]], ["mask", "INT64", [1, 4]]);
    refuses(odd, AXIS_1, /inputs "ids" and "mask" disagree in dimension 1, .*: 3 and 4; pad\.inputs/);
    refuses(odd, { ...AXIS_1, inputs: ["ids", "mask"] }, /disagree in dimension 1, .*: 3 and 4$/);
    assert.doesNotThrow(() => drafts(odd.body, odd.headers, { pad: { ...AXIS_1, inputs: ["ids"] } }));
    const bytes = requestBytes({
      model_name: "m",
      inputs: [
        { name: "a", datatype: "INT8", shape: [1, 2] },
        { name: "b", datatype: "INT8", shape: [1, 1] },
      ],
      raw_input_contents: [Buffer.alloc(2), Buffer.alloc(1)],
    });
    assert.match(draftsOf(bytes, () => ({ pad: AXIS_1 })).flaw!, /"a" and "b" disagree in dimension 1/);
  });

  test("a value that the datatype does not have, and a length without elements", () => {
    const one = request(["ids", "UINT8", [1, 3]]);
    refuses(one, { axis: 1, value: -1 }, /input "ids" is UINT8, which has no -1, this model's pad\.value/);
    refuses(one, { axis: 1, value: 0.5 }, /has no 0\.5/);
    refuses(request(["ids", "BOOL", [1, 0]]), { axis: 1, value: 2 }, /is BOOL, which has no 2/);
    refuses(
      request(["x", "FP32", [1, 2 ** 40, 0]]),
      AXIS_1,
      /has a dimension 1 of 1099511627776, but no elements/,
    );
  });

  test("length 0 is a length", () => {
    const batch = tasks({ ...AXIS_1, outputs: ["y"] }, ids([]), ids([7, 8]));
    assert.deepEqual(batch.inputs.map(estimateTokens), [1, 2]);
    const [tensor] = sent(call(batch));
    assert.deepEqual([tensor!.shape, JSON.stringify(tensor!.data)], [[2, 2], "[0,0,7,8]"]);
    assert.deepEqual(firsts(reply([{ ...tensor!, name: "y" }], batch)), [
      [[1, 0], "[]"],
      [[1, 2], "[7,8]"],
    ]);
    assert.deepEqual(sent(call(tasks(AXIS_1, ids([]))))[0]!.shape, [1, 0]);
  });

  test("one row of 1 and one of 100,000; padding that outgrows what was sent", () => {
    const raw = (length: number): Sent =>
      writeMessage(
        {},
        [{ name: "x", datatype: "INT64", shape: [1, length], raw: Buffer.alloc(8 * length, 1) }],
        "inputs",
      );
    const two = tasks(AXIS_1, raw(1), raw(100_000));
    const [x] = sent(call(two));
    assert.deepEqual(x!.shape, [2, 100_000]);
    assert.equal(
      x!.raw!.subarray(0, 800_000).reduce((sum, byte) => sum + byte, 0),
      8,
    );
    assert.deepEqual(two.inputs.map(estimateTokens), [1, 100_000]);
    const [short, long] = two.inputs as [string, string];
    const many = { ...two, inputs: [...Array<string>(99).fill(short), long] };
    const { flaw } = worker.call(many.inputs, many.parameters, "toy");
    assert.match(
      flaw!,
      /^100 rows padded to a length of 100000 take 80000000 bytes, of which 800792 are theirs; at most/,
    );
    const huge = { ...AXIS_1, classes: [2 ** 40] };
    const one = tasks(huge, ids([1]));
    assert.match(worker.call(one.inputs, one.parameters, "toy").flaw!, /padded to a length of 1099511627776/);
  });

  test("tasks that a native caller forged", () => {
    const { inputs, parameters } = tasks({ ...AXIS_1, lengthsInput: "n" }, ids([1, 2, 3]));
    for (const bad of [
      "[[1,2,3]]",
      '{"$length":4,"row":[[1,2,3]]}',
      '{"$length":2,"row":[[1,2,3]]}',
      '{"$length":03,"row":[[1,2,3]]}',
      '{"$length":-1,"row":[[]]}',
      '{"$length":99999,"row":[[1,2,3]]}',
      '{"$length":1e3,"row":[[1,2,3]]}',
      '{"$length":3,"row":[[1,2,3],[4,5,6]]}',
      '{"$length":3,"row":{"0":[1,2,3]}}',
      '{"$length":3}',
      '{"$length":3,"row":"x"}',
      "null",
    ]) {
      assert.match(worker.call([inputs[0]!, bad], parameters, "toy").flaw!, /./, bad);
      assert.match(callOf({ id: "b", inputs: [inputs[0]!, bad], parameters }, "m", "").flaw!, /./, bad);
    }
    for (const pad of ["null", "1", '"x"', "{}", '{"axis":0,"value":0}', '{"axis":1,"value":"0"}', "[]"]) {
      const odd = parameters.replace(/"pad":\{[^}]*\}/, `"pad":${pad}`);
      assert.match(worker.call(inputs, odd, "toy").flaw!, /speak the Open Inference Protocol/, pad);
    }
  });
});
