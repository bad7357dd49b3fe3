/**
 * A server of the Open Inference Protocol over HTTP, made from its documents and strict: what it gets must be right to
 * the byte. Its model echoes: for each input `x` there is an output `x_out` with the same values, number texts untouched.
 *
 * `infer` is pure, so that a test can ask it what the server alone would have answered.
 */
import { createServer, type IncomingHttpHeaders, type IncomingMessage, type Server } from "node:http";
import { ReturningServer } from "../../../e2e/returning-server.ts";

/** A number as it was written. */
type Value = string | boolean | { readonly rawJSON: string };

export interface Tensor {
  readonly name: string;
  readonly datatype: string;
  readonly shape: readonly number[];
  readonly parameters?: Readonly<Record<string, unknown>>;
  readonly data?: readonly Value[];
  readonly raw?: Buffer;
}

export interface Infer {
  readonly id?: string;
  readonly parameters?: Readonly<Record<string, unknown>>;
  readonly tensors: readonly Tensor[];
  readonly outputs?: readonly { name: string; parameters?: Readonly<Record<string, unknown>> }[];
}

export interface Sent {
  readonly status: number;
  readonly headers: Readonly<Record<string, string>>;
  readonly body: Buffer;
}

/** Bytes of an element. */
export const SIZES: Readonly<Record<string, number>> = {
  BOOL: 1,
  INT8: 1,
  UINT8: 1,
  INT16: 2,
  UINT16: 2,
  FP16: 2,
  BF16: 2,
  INT32: 4,
  UINT32: 4,
  FP32: 4,
  INT64: 8,
  UINT64: 8,
  FP64: 8,
};
export const HEADER = "inference-header-content-length";

/** What TypeScript's library does not know yet. */
const exact = JSON as unknown as {
  parse(
    text: string,
    revive: (key: string, value: unknown, context: { source?: string }) => unknown,
  ): unknown;
  rawJSON(text: string): Value;
};

/** A number that is written in these characters. */
export function exactly(text: string): Value {
  return exact.rawJSON(text);
}

class Wrong extends Error {}

/** JSON with every number as it was written. */
export function parseExactly(text: string): unknown {
  return exact.parse(text, (_key, value, { source }) =>
    typeof value === "number" ? exactly(source!) : value,
  );
}

/** A request, or an answer (`"outputs"`), taken apart. Throws when it breaks the protocol. */
export function readMessage(body: Buffer, length: string | undefined, field: "inputs" | "outputs"): Infer {
  const end = length === undefined ? body.length : Number(length);
  const json = JSON.parse(body.subarray(0, end).toString("utf8")) as Record<string, unknown>;
  const exactTensors = parseExactly(body.subarray(0, end).toString("utf8")) as Record<string, Tensor[]>;
  const known = field === "inputs" ? ["outputs"] : ["model_name", "model_version"];
  for (const name of Object.keys(json)) {
    if (!["id", "parameters", field, ...known].includes(name)) throw new Wrong(`unexpected field ${name}`);
  }
  let at = end;
  const tensors = (json[field] as Tensor[]).map((tensor, index) => {
    const { name, datatype, shape, parameters } = tensor;
    const size = parameters?.["binary_data_size"];
    if (size === undefined) {
      const data = (exactTensors[field]![index]!.data as unknown[]).flat(Infinity) as Value[];
      if (data.length !== count(shape))
        throw new Wrong(`${name}: ${data.length} values for [${shape.join(",")}]`);
      return { name, datatype, shape, parameters: parameters ?? {}, data };
    }
    if (length === undefined) throw new Wrong("binary_data_size without Inference-Header-Content-Length");
    const raw = body.subarray(at, (at += Number(size)));
    checkBytes(raw, datatype, shape);
    return { name, datatype, shape, parameters: { ...parameters, binary_data_size: undefined }, raw };
  });
  if (at !== body.length) throw new Wrong(`unexpected additional input data: ${body.length - at} bytes`);
  return { ...(json as object), tensors };
}

function count(shape: readonly number[]): number {
  return shape.reduce((product, dimension) => product * dimension, 1);
}

function checkBytes(raw: Buffer, datatype: string, shape: readonly number[]): void {
  if (datatype !== "BYTES") {
    if (raw.length !== count(shape) * SIZES[datatype]!) throw new Wrong("unexpected byte size of an input");
    return;
  }
  let at = 0;
  for (let left = count(shape); left > 0; left--) at += 4 + raw.readUInt32LE(at);
  if (at !== raw.length) throw new Wrong("unexpected byte size of BYTES");
}

/** A tensor as JSON, and as bytes where it is one. */
export function writeMessage(head: object, tensors: readonly Tensor[], field: "inputs" | "outputs"): Sent {
  const raws = tensors.flatMap(({ raw }) => (raw === undefined ? [] : [raw]));
  const described = tensors.map(({ raw, parameters = {}, ...tensor }) => {
    const own = raw === undefined ? parameters : { ...parameters, binary_data_size: raw.length };
    return Object.keys(own).length === 0 ? tensor : { ...tensor, parameters: own };
  });
  const json = Buffer.from(JSON.stringify({ ...head, [field]: described }));
  if (raws.length === 0) return { status: 200, headers: { "content-type": "application/json" }, body: json };
  const headers = { "content-type": "application/octet-stream", [HEADER]: String(json.length) };
  return { status: 200, headers, body: Buffer.concat([json, ...raws]) };
}

export interface Rules {
  readonly maxBatchSize?: number;
  /** One output for all rows together instead of one each. */
  readonly pooled?: boolean;
  /** It does not speak the binary extension, and answers whatever uses it with this status. */
  readonly jsonOnly?: number;
  /** It answers 500 to everything. */
  readonly broken?: boolean;
  /** Those that it has; left out: any. */
  readonly versions?: readonly string[];
}

export function infer(body: Buffer, headers: IncomingHttpHeaders, rules: Rules = {}): Sent {
  try {
    const request = readMessage(body, headers[HEADER] as string | undefined, "inputs");
    const { tensors, outputs, id, parameters } = request;
    const rows = tensors[0]!.shape[0];
    if (tensors.some(({ shape }) => shape[0] !== rows)) throw new Wrong("batch sizes differ");
    if (rows! > (rules.maxBatchSize ?? Infinity))
      throw new Wrong(`batch-size must be <= ${rules.maxBatchSize}`);
    const wanted = outputs?.map(({ name }) => name) ?? tensors.map(({ name }) => `${name}_out`);
    const answered = wanted.map((name): Tensor => {
      const tensor = tensors.find((each) => `${each.name}_out` === name);
      if (tensor === undefined) throw new Wrong(`unexpected inference output '${name}'`);
      const asked = outputs?.find((output) => output.name === name)?.parameters?.["binary_data"];
      const binary = (asked ?? parameters?.["binary_data_output"]) === true;
      if (rules.pooled === true) {
        return { name, datatype: "INT64", shape: [], data: [exactly(String(rows))] };
      }
      const { datatype, shape } = tensor;
      return { name, datatype, shape, ...(binary ? { raw: rawOf(tensor) } : { data: dataOf(tensor) }) };
    });
    return writeMessage(
      { model_name: "toy", model_version: "7", ...(id !== undefined && { id }) },
      answered,
      "outputs",
    );
  } catch (error) {
    const text = JSON.stringify({ error: (error as Error).message });
    return { status: 400, headers: { "content-type": "application/json" }, body: Buffer.from(text) };
  }
}

/** Only what the tests send either way: FP32, FP64, INT32, INT64, BYTES. */
export function rawOf({ raw, data, datatype }: Tensor): Buffer {
  if (raw !== undefined) return raw;
  const parts = data!.map((value) => {
    if (datatype === "BYTES") {
      const bytes = Buffer.from(value as string);
      const length = Buffer.alloc(4);
      length.writeUInt32LE(bytes.length);
      return Buffer.concat([length, bytes]);
    }
    const text = (value as { rawJSON: string }).rawJSON;
    const bytes = Buffer.alloc(SIZES[datatype]!);
    if (datatype === "INT64") bytes.writeBigInt64LE(BigInt(text));
    else if (datatype === "INT32") bytes.writeInt32LE(Number(text));
    else if (datatype === "FP32") bytes.writeFloatLE(Number(text));
    else bytes.writeDoubleLE(Number(text));
    return bytes;
  });
  return Buffer.concat(parts);
}

export function dataOf({ raw, data, datatype }: Tensor): readonly Value[] {
  if (data !== undefined) return data;
  const values: Value[] = [];
  for (let at = 0; at < raw!.length;) {
    if (datatype === "BYTES") {
      const end = at + 4 + raw!.readUInt32LE(at);
      values.push(raw!.subarray(at + 4, end).toString("utf8"));
      at = end;
      continue;
    }
    const text =
      datatype === "INT64"
        ? String(raw!.readBigInt64LE(at))
        : String(
            datatype === "INT32"
              ? raw!.readInt32LE(at)
              : datatype === "FP32"
                ? raw!.readFloatLE(at)
                : raw!.readDoubleLE(at),
          );
    values.push(exactly(text));
    at += SIZES[datatype]!;
  }
  return values;
}

function said(status: number, body: object): Sent {
  const headers = { "content-type": "application/json" };
  return { status, headers, body: Buffer.from(JSON.stringify(body)) };
}

/** What a test may put in the place of an answer; undefined: as the protocol says. */
export type Twist = (sent: Sent, rows: number) => Sent | undefined;

export class OipServer extends ReturningServer {
  readonly #rules: Rules;
  readonly calls: { readonly path: string; readonly rows: number; readonly binary: boolean }[] = [];
  /** Calls that it refused because of its rules. */
  refused = 0;
  /** How often it was asked for its metadata. */
  asked = 0;
  twist: Twist = () => undefined;

  private constructor(rules: Rules) {
    super();
    this.#rules = rules;
  }

  static async listen(rules: Rules = {}): Promise<OipServer> {
    const server = new OipServer(rules);
    await server.open();
    return server;
  }

  /** As it stands in a config. */
  endpoint(model = "toy"): string {
    return `${this.url}/v2/models/${model}/infer`;
  }

  protected override make(): Server {
    return createServer({ keepAliveTimeout: 60_000 }, (request, response) => {
      response.on("error", () => {}); // Ferry may hang up while we answer.
      void this.#answer(request).then(({ status, headers, body }) =>
        response.writeHead(status, headers).end(body),
      );
    });
  }

  async #answer(request: IncomingMessage): Promise<Sent> {
    const chunks: Buffer[] = [];
    for await (const chunk of request) chunks.push(chunk as Buffer);
    const body = Buffer.concat(chunks);
    const path = request.url!;
    const { jsonOnly, versions, broken } = this.#rules;
    if (broken === true) return said(500, { error: "broken" });
    if (request.method === "GET" && path === "/v2") {
      this.asked++;
      const extensions = jsonOnly === undefined ? ["binary_tensor_data"] : [];
      return said(200, { name: "toy", version: "1", extensions });
    }
    const version = /\/versions\/(\w+)\/infer$/.exec(path)?.[1];
    if (version !== undefined && versions?.includes(version) === false) {
      this.refused++;
      return said(404, { error: `Request for unknown model: 'toy' version ${version} is not found` });
    }
    if (jsonOnly !== undefined && (request.headers[HEADER] !== undefined || body.includes('"binary_data'))) {
      this.refused++;
      return said(jsonOnly, { detail: "Input should be a valid dictionary" });
    }
    if (!/^\/v2\/models\/toy(\/versions\/\d+)?\/infer$/.test(path)) {
      return said(404, { error: `Request for unknown model: ${path}` });
    }
    const sent = infer(body, request.headers, this.#rules);
    const binary = request.headers[HEADER] !== undefined;
    const rows =
      sent.status === 200
        ? readMessage(body, request.headers[HEADER] as string, "inputs").tensors[0]!.shape[0]!
        : 0;
    this.calls.push({ path, rows, binary });
    return this.twist(sent, rows) ?? sent;
  }
}
