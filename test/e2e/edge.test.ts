/**
 * What deploy/compose and deploy/edge describe, without Docker: its config, its toy workers, and nginx in front of the
 * gateways as an edge. Only names and ports are the test's.
 */
import assert from "node:assert/strict";
import { spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { test } from "node:test";
import { Agent, request } from "undici";
import { parse } from "yaml";
import { Authority } from "../fixtures/certificates.ts";
import { startServer } from "../engine/redis-client/servers.ts";
import { Fleet } from "./fleet.ts";
import { eventually, freePort, ROOT, type Body, type Config } from "./harness.ts";
import { Nginx } from "./nginx.ts";

class ToyWorker implements AsyncDisposable {
  readonly url: string;
  readonly #process: ChildProcess;
  readonly #exited: Promise<unknown>;

  private constructor(process: ChildProcess, port: number) {
    this.#process = process;
    this.url = `http://127.0.0.1:${port}/infer`;
    this.#exited = once(process, "exit");
  }

  static async start(): Promise<ToyWorker> {
    const port = await freePort();
    const env = { ...process.env, PORT: String(port), BATCH_MS: "20" };
    const words = [join(ROOT, "deploy/compose/worker.mjs")];
    const child = spawn(process.execPath, words, { env, stdio: ["ignore", "pipe", "inherit"] });
    await once(createInterface({ input: child.stdout }), "line");
    return new ToyWorker(child, port);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    if (this.#process.exitCode !== null || this.#process.signalCode !== null) return;
    this.#process.kill("SIGKILL");
    await this.#exited;
  }
}

/** The config of compose.yaml on these addresses. */
async function composeConfig(redis: string, workers: readonly ToyWorker[]): Promise<Config> {
  const text = await readFile(join(ROOT, "deploy/compose/ferry.yaml"), "utf8");
  const file = parse(text.replaceAll("${FERRY_ADMIN_TOKEN}", "token")) as {
    engine: object;
    models: { timeouts?: object; backend: { workers: string[] } }[];
  };
  // Whoever is accepted while the last worker dies waits for so long.
  file.models[0]!.timeouts = { queueMs: 8000, workerMs: 8000, totalMs: 10_000 };
  file.models[0]!.backend.workers = workers.map(({ url }) => url);
  const engine = { ...file.engine, url: redis };
  const loopback = { listen: "127.0.0.1:0", admin: { listen: "127.0.0.1:0" }, telemetry: {} };
  return { ...file, ...loopback, engine };
}

const host = (url: string): string => new URL(url).host;

test("requests through the edge: TLS, HTTP/2, a dead gateway, refusals as Ferry wrote them", async () => {
  await using stack = new AsyncDisposableStack();
  const redis = stack.use(await startServer());
  const workers = await Promise.all([ToyWorker.start(), ToyWorker.start()]);
  for (const worker of workers) stack.use(worker);
  const config = await composeConfig(redis.url, workers);
  const fleet = stack.use(await Fleet.start({ gateways: 2, batchers: 1 }, config));
  const [first, second] = fleet.gateways.map(({ url }) => host(url)) as [string, string];
  const authority = new Authority();
  stack.defer(() => authority[Symbol.dispose]());
  const closed = `127.0.0.1:${await freePort()}`;
  const grpc = { "gateway-1:8090": closed, "gateway-2:8090": closed };
  const gateways = { "gateway-1:8080": first, "gateway-2:8080": second };
  const edge = stack.use(await Nginx.start("edge/nginx.conf", { ...gateways, ...grpc }, authority.issue()));
  const laptop = stack.use(await Nginx.start("compose/nginx.conf", { "gateway:8080": first }));
  const agent = new Agent({ allowH2: true, connect: { ca: authority.own.cert } });
  stack.defer(() => agent.destroy());
  const base = `https://127.0.0.1:${edge.port}`;
  const post = async (input: string, url = base) => {
    const headers = { "content-type": "application/json" };
    const body = JSON.stringify({ input });
    const answer = await request(`${url}/v1/inference`, { method: "POST", headers, body, dispatcher: agent });
    const json = (await answer.body.json()) as Body;
    return { status: answer.statusCode, headers: answer.headers, json };
  };

  const answers = await Promise.all(Array.from({ length: 40 }, (_, at) => post(`input ${at}`)));
  for (const { status, json } of answers) {
    assert.equal(status, 200, JSON.stringify(json));
    assert.equal((json.output as number[]).length, 8);
  }
  assert.equal(new Set(answers.map(({ json }) => String(json.output))).size > 1, true);
  const batched = answers.map(({ headers }) => Number(headers["x-ferry-batch-size"]));
  assert.ok(Math.max(...batched) > 1, "requests that came by different gateways shared a batch");
  assert.equal((await post("plain", `http://127.0.0.1:${laptop.port}`)).status, 200);
  const inside = await request(`${base}/internal/health`, { dispatcher: agent });
  assert.equal(inside.statusCode, 404);
  await inside.body.dump();

  await fleet.gateways[0]!.kill();
  for (let at = 0; at < 20; at++)
    assert.equal((await post(`after ${at}`)).status, 200, "the other one takes it");

  for (const worker of workers) await worker[Symbol.asyncDispose]();
  let refused = await post("nobody is there");
  await eventually(async () => (refused = await post("nobody is there")).status === 503);
  assert.match(String(refused.headers["retry-after"]), /^\d+$/);
  assert.equal(refused.json.error, "SERVICE_OVERLOADED");
});
