/** The real thing for tests: clients, servers and messages made by grpc-js and proto-loader from the public definition. */
import { join } from "node:path";
import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

export interface Tensor {
  readonly name: string;
  readonly datatype: string;
  readonly shape: readonly (number | string)[];
  readonly parameters?: Readonly<Record<string, Parameter>>;
  readonly contents?: Contents;
}
export type Parameter =
  | { readonly bool_param: boolean }
  | { readonly int64_param: string | number }
  | { readonly string_param: string }
  | { readonly double_param: number }
  | { readonly uint64_param: string | number };
export interface Contents {
  readonly bool_contents?: readonly boolean[];
  readonly int_contents?: readonly number[];
  readonly int64_contents?: readonly (string | number)[];
  readonly uint_contents?: readonly number[];
  readonly uint64_contents?: readonly (string | number)[];
  readonly fp32_contents?: readonly number[];
  readonly fp64_contents?: readonly number[];
  readonly bytes_contents?: readonly Buffer[];
}
export interface InferRequest {
  readonly model_name: string;
  readonly model_version?: string;
  readonly id?: string;
  readonly parameters?: Readonly<Record<string, Parameter>>;
  readonly inputs: readonly Tensor[];
  readonly outputs?: readonly { readonly name: string; readonly parameters?: Record<string, Parameter> }[];
  readonly raw_input_contents?: readonly Buffer[];
}
export interface InferResponse {
  readonly model_name: string;
  readonly model_version?: string;
  readonly id?: string;
  readonly parameters?: Readonly<Record<string, Parameter>>;
  readonly outputs: readonly Tensor[];
  readonly raw_output_contents?: readonly Buffer[];
}

/** Integers of 64 bits as text, and no field that was not sent. */
const definition = loadSync(join(import.meta.dirname, "../../fixtures/open_inference_grpc.proto"), {
  keepCase: true,
  longs: String,
  oneofs: true,
});

export const service = definition["inference.GRPCInferenceService"] as unknown as Record<
  string,
  {
    readonly path: string;
    readonly requestStream: false;
    readonly responseStream: false;
    readonly requestSerialize: (value: object) => Buffer;
    readonly requestDeserialize: (bytes: Buffer) => object;
    readonly responseSerialize: (value: object) => Buffer;
    readonly responseDeserialize: (bytes: Buffer) => object;
  }
>;

export const infer = service["ModelInfer"]!;

export function requestBytes(request: InferRequest): Buffer {
  return infer.requestSerialize(request);
}
export function readRequest(bytes: Buffer): InferRequest {
  return infer.requestDeserialize(bytes) as InferRequest;
}
export function responseBytes(response: InferResponse): Buffer {
  return infer.responseSerialize(response);
}
export function readResponse(bytes: Buffer): InferResponse {
  return infer.responseDeserialize(bytes) as InferResponse;
}

/** What a call says besides its message. */
export interface CallOptions {
  readonly metadata?: Readonly<Record<string, string>>;
  readonly timeoutMs?: number;
}

/** A client of grpc-js. */
export class OipClient implements Disposable {
  readonly #client: grpc.Client;

  constructor(
    address: string,
    credentials = grpc.credentials.createInsecure(),
    options: grpc.ClientOptions = {},
  ) {
    this.#client = new grpc.Client(address, credentials, { "grpc.enable_retries": 0, ...options });
  }

  /** Rejects with grpc's ServiceError. */
  call(method: string, request: object, options: CallOptions = {}): Promise<object> {
    return new Promise((resolve, reject) => {
      this.start(method, request, options, (error, answer) =>
        error === null ? resolve(answer!) : reject(error),
      );
    });
  }

  start(
    method: string,
    request: object,
    { metadata = {}, timeoutMs }: CallOptions,
    done: (error: grpc.ServiceError | null, answer: object | undefined) => void,
  ): grpc.ClientUnaryCall {
    const sent = new grpc.Metadata();
    for (const name in metadata) sent.set(name, metadata[name]!);
    const { path, requestSerialize, responseDeserialize } = service[method]!;
    const deadline = timeoutMs === undefined ? {} : { deadline: Date.now() + timeoutMs };
    return this.#client.makeUnaryRequest(
      path,
      requestSerialize,
      responseDeserialize,
      request,
      sent,
      deadline,
      done,
    );
  }

  infer(request: InferRequest, options?: CallOptions): Promise<InferResponse> {
    return this.call("ModelInfer", request, options) as Promise<InferResponse>;
  }

  [Symbol.dispose](): void {
    this.#client.close();
  }
}

export type Serve = (
  request: InferRequest,
  call: grpc.ServerUnaryCall<InferRequest, InferResponse>,
) => InferResponse | Promise<InferResponse | undefined> | undefined;

/** A failure that a server answers with. */
export function status(code: grpc.status, details: string, trailers: Record<string, string> = {}): Error {
  const metadata = new grpc.Metadata();
  for (const name in trailers) metadata.set(name, trailers[name]!);
  return Object.assign(new Error(details), { code, details, metadata });
}

/** A server of grpc-js; an answer of undefined leaves the call open. */
export class OipServer implements AsyncDisposable {
  readonly requests: InferRequest[] = [];
  readonly metadata: grpc.Metadata[] = [];
  readonly #server: grpc.Server;
  ready = true;
  serve: Serve;
  port = 0;
  /** Calls that are not answered and were not called off. */
  open = 0;
  cancelled = 0;

  private constructor(serve: Serve, options: grpc.ServerOptions) {
    this.serve = serve;
    this.#server = new grpc.Server(options);
    const infers: grpc.handleUnaryCall<InferRequest, InferResponse> = (call, done) =>
      void this.#infer(call, done);
    const isReady: grpc.handleUnaryCall<object, object> = (_, done) => done(null, { ready: this.ready });
    const offered = { ModelInfer: infer, ModelReady: service["ModelReady"]! };
    this.#server.addService(offered, { ModelInfer: infers, ModelReady: isReady });
  }

  static async listen(
    serve: Serve,
    {
      credentials = grpc.ServerCredentials.createInsecure(),
      options = {},
      port = 0,
    }: { credentials?: grpc.ServerCredentials; options?: grpc.ServerOptions; port?: number } = {},
  ): Promise<OipServer> {
    const server = new OipServer(serve, { "grpc.max_receive_message_length": -1, ...options });
    server.port = await new Promise<number>((resolve, reject) => {
      server.#server.bindAsync(`127.0.0.1:${port}`, credentials, (error, bound) =>
        error === null ? resolve(bound) : reject(error),
      );
    });
    return server;
  }

  get url(): string {
    return `grpc://127.0.0.1:${this.port}`;
  }

  /** Every connection is cut at once; the listener is gone. */
  die(): void {
    this.#server.forceShutdown();
  }

  async #infer(
    call: grpc.ServerUnaryCall<InferRequest, InferResponse>,
    done: grpc.sendUnaryData<InferResponse>,
  ): Promise<void> {
    this.requests.push(call.request);
    this.metadata.push(call.metadata);
    this.open++;
    call.on("cancelled", () => {
      this.cancelled++;
      this.open--;
    });
    try {
      const answer = await this.serve(call.request, call);
      if (answer === undefined || call.cancelled) return;
      this.open--;
      done(null, answer);
    } catch (error) {
      this.open--;
      done(error as grpc.ServiceError);
    }
  }

  [Symbol.asyncDispose](): Promise<void> {
    this.#server.forceShutdown();
    return Promise.resolve();
  }
}
