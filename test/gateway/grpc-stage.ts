/** Ferry between a client and a server of grpc-js, in this process. */
import { stringify } from "yaml";
import type { credentials } from "@grpc/grpc-js";
import { SystemClock } from "../../src/app/clock.ts";
import { parseConfig } from "../../src/app/config/load.ts";
import { type Ferry, startFerry } from "../../src/app/ferry.ts";
import type { AnsweredRequest } from "../../src/observe/events.ts";
import {
  type InferRequest,
  type InferResponse,
  OipClient,
  OipServer,
  type Serve,
} from "./protocol/oip-service.ts";

export interface Wishes {
  readonly settings?: Readonly<Record<string, unknown>>;
  readonly model?: Readonly<Record<string, unknown>>;
  readonly backend?: Readonly<Record<string, unknown>>;
  readonly credentials?: ReturnType<typeof credentials.createInsecure>;
}

export class GrpcStage implements AsyncDisposable {
  readonly server: OipServer;
  readonly ferry: Ferry;
  readonly client: OipClient;
  /** Every request that ended, as those who look on see it. */
  readonly answered: Pick<AnsweredRequest, "route" | "status" | "code" | "model" | "tenant" | "work">[] = [];

  private constructor(server: OipServer, ferry: Ferry, client: OipClient) {
    this.server = server;
    this.ferry = ferry;
    this.client = client;
    ferry.events.on("request.answered", ({ route, status, code, model, tenant, work }) =>
      this.answered.push({ route, status, code, model, tenant, work }),
    );
  }

  static async open(
    serve: Serve,
    { settings = {}, model = {}, backend = {}, credentials }: Wishes = {},
  ): Promise<GrpcStage> {
    const server = await OipServer.listen(serve);
    const text = stringify({
      listen: "127.0.0.1:0",
      admin: { listen: "127.0.0.1:0" },
      telemetry: { logLevel: "silent", dashboard: false, metrics: false },
      models: [
        {
          name: "m",
          backend: { kind: "grpc", workers: [server.url], ...backend },
          maxBatchSize: 16,
          ...model,
        },
      ],
      // Whether the workers are fast enough on a machine that others use is not what is tried here.
      admission: { mode: "off" },
      ...settings,
      grpc: { listen: "127.0.0.1:0", ...(settings["grpc"] as object | undefined) },
    });
    const { config, problems } = { problems: [], ...parseConfig(text, "ferry.yaml", {}) };
    if (config === undefined)
      throw new Error(problems.map(({ path, message }) => `${path}: ${message}`).join("\n"));
    const ferry = await startFerry(config, new SystemClock(), "all", () => {});
    return new GrpcStage(server, ferry, new OipClient(address(ferry.grpcUrl), credentials));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.client[Symbol.dispose]();
    await this.ferry.stop();
    await this.server[Symbol.asyncDispose]();
  }
}

/** As grpc-js takes it. */
export function address(grpcUrl: string): string {
  return grpcUrl.replace(/^grpcs?:\/\//, "").replace("127.0.0.1", "localhost");
}

/** y = 2x of every value, row by row, in the form in which it was asked. */
export const doubling: Serve = ({ inputs: [x], raw_input_contents: raw = [], model_name }): InferResponse => {
  const output = { name: "y", datatype: "FP32", shape: x!.shape };
  if (raw.length === 0) {
    const fp32_contents = x!.contents!.fp32_contents!.map((value) => 2 * value);
    return { model_name, model_version: "7", outputs: [{ ...output, contents: { fp32_contents } }] };
  }
  const values = new Float32Array(new Uint8Array(raw[0]!).buffer).map((value) => 2 * value);
  return {
    model_name,
    model_version: "7",
    outputs: [output],
    raw_output_contents: [Buffer.from(values.buffer)],
  };
};

export function rawRequest(
  rows: readonly (readonly number[])[],
  more: Partial<InferRequest> = {},
): InferRequest {
  const values = new Float32Array(rows.flat());
  const shape = [rows.length, rows[0]!.length];
  return {
    model_name: "m",
    inputs: [{ name: "x", datatype: "FP32", shape }],
    raw_input_contents: [Buffer.from(values.buffer)],
    ...more,
  };
}

export function rawValues({ raw_output_contents: raw = [] }: InferResponse): number[] {
  return [...new Float32Array(new Uint8Array(raw[0]!).buffer)];
}
