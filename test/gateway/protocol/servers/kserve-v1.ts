/**
 * A server of KServe's v1 protocol, which is TensorFlow Serving's REST API, and strict. Its model wraps each instance:
 * `{"of": instance}`, number texts untouched. The instance "bad" is refused, and with it the whole call.
 */
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import { ReturningServer } from "../../../e2e/returning-server.ts";
import { parseExactly } from "./oip.ts";

export interface PredictCall {
  readonly path: string;
  readonly signature: string | undefined;
  readonly instances: readonly unknown[];
}

export class PredictServer extends ReturningServer {
  readonly calls: PredictCall[] = [];

  static async listen(): Promise<PredictServer> {
    const server = new PredictServer();
    await server.open();
    return server;
  }

  /** As it stands in a config. */
  endpoint(): string {
    return `${this.url}/v1/models/toy:predict`;
  }

  protected override make(): Server {
    return createServer(
      { keepAliveTimeout: 60_000 },
      (request, response) => void this.#answer(request, response),
    );
  }

  async #answer(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const chunks: Buffer[] = [];
    for await (const chunk of request) chunks.push(chunk as Buffer);
    const say = (status: number, body: object): void =>
      void response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(body));
    const path = request.url!;
    if (!/^\/v1\/models\/toy(\/versions\/\d+)?:predict$/.test(path))
      return say(404, { error: `Not found: ${path}` });
    const body = parseExactly(Buffer.concat(chunks).toString("utf8")) as Record<string, unknown>;
    const { instances, signature_name: signature, ...others } = body;
    if (Object.keys(others).length > 0)
      return say(400, { error: `unexpected ${Object.keys(others).join()}` });
    if (!Array.isArray(instances) || instances.length === 0)
      return say(400, { error: "Missing 'inputs' or 'instances' key" });
    this.calls.push({ path, instances, signature: signature as string | undefined });
    if (instances.includes("bad")) return say(400, { error: "bad instance" });
    say(200, { predictions: instances.map((of: unknown) => ({ of })) });
  }
}
