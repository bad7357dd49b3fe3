/** `ferry serve --processes`: credentials, rates, protocols, TLS, the request log and traces are as with one process. */
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { once } from "node:events";
import { get, type IncomingMessage } from "node:http";
import { after, before, describe, test } from "node:test";
import { promisify } from "node:util";
import OpenAI from "openai";
import { Authority } from "../fixtures/certificates.ts";
import { claims, pem, rsaPair, token } from "../gateway/admission/stage.ts";
import { rawFromJson } from "../../src/gateway/protocol/oip-tensors.ts";
import { OipClient, OipServer } from "../gateway/protocol/oip-service.ts";
import { PostgresServer } from "../observe/postgres/server.ts";
import { echo } from "../workers/backend/grpc-stage.ts";
import { patient } from "./fleet.ts";
import { counter, type Door, engineConfig, KINDS, Several } from "./gateways.ts";
import { assertError, eventually, Folder, type Headers, runFerry, writeConfig } from "./harness.ts";
import { openModel, OpenWorker } from "./open-worker.ts";
import { OtlpCollector } from "./otlp-collector.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

const ISSUER = rsaPair();
const CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const bearer = (text: string): Headers => ({ authorization: `Bearer ${text}` });
const as = (sub: string, tier: string): Headers => bearer(token(ISSUER, claims(Date.now(), { sub, tier })));

for (const kind of KINDS) {
  describe(`who may enter, and what is written down of it, ${kind}`, () => {
    const stack = new AsyncDisposableStack();
    let folder: Folder;
    let postgres: PostgresServer;
    let collector: OtlpCollector;
    let ferry: Several;
    let [a, b]: Door[] = [];
    let key = "";

    before(async () => {
      folder = stack.use(await Folder.make());
      postgres = stack.use(await PostgresServer.start());
      collector = stack.use(await OtlpCollector.listen());
      const stub = stack.use(await StubWorker.listen());
      const publicKeyFile = await folder.write("jwt.pem", pem(ISSUER));
      const jwt = { issuer: "https://id.example", audience: "ferry", publicKeyFile };
      const keysFile = kind === "memory" ? { keysFile: `${folder.path}/keys.json` } : {};
      const model = stubModel([stub], { timeouts: patient, cache: { scope: "off" }, collapse: false });
      const config = await engineConfig(kind, stack, folder, [model], {
        auth: { mode: "required", jwt, ...keysFile },
        limits: { perUserPerMinute: 30 },
        tiers: { paid: {}, free: { ratePerMinute: 20 } },
        admission: { mode: "off" },
        requestLog: { url: postgres.url },
        telemetry: { otlpUrl: collector.url, sample: 0 },
      });
      const file = await writeConfig(folder, config);
      const made = await runFerry(["keys", "create", "--user", "k", "--tier", "paid", "-c", file]);
      assert.equal(made.code, 0, made.stderr);
      key = made.stdout.trim();
      ferry = stack.use(await Several.start(config));
      [a, b] = ferry.doors();
    });
    after(() => stack.disposeAsync());

    const crowd = async (count: number, headers: (n: number) => Headers): Promise<[number, number]> => {
      const posts = Array.from({ length: count }, (_, n) =>
        (n % 2 === 0 ? a! : b!).post({ input: n }, headers(n)),
      );
      const answers = await Promise.all(posts);
      const of = (status: number): number => answers.filter((answer) => answer.status === status).length;
      for (const answer of answers) if (answer.status !== 200) assertError(answer, 429, "RATE_LIMITED");
      return [of(200), of(429)];
    };

    test("keys and tokens hold at every gateway, and a task is its owner's everywhere", async () => {
      for (const door of [a!, b!]) {
        // On Redis a gateway hears of a key when it is asked.
        await eventually(async () => (await door.get("/v1/result/x", bearer(key))).status === 404);
        assertError(await door.post({ input: 1 }), 401, "UNAUTHENTICATED");
        assertError(await door.post({ input: 1 }, bearer(`${key}x`)), 401, "UNAUTHENTICATED");
      }
      const id = await a!.accept({ input: "owned" }, bearer(key));
      assert.equal((await b!.result(id, bearer(key))).status, "SUCCESS");
      assert.equal((await b!.get(`/v1/result/${id}`, as("other", "paid"))).status, 404);
    });

    test("a user's and a tier's rate hold for all gateways together", async () => {
      const eager = as("eager", "paid");
      const [passed, refused] = await crowd(45, () => eager);
      assert.deepEqual([passed, refused], [30, 15]);
      const free = [as("f1", "free"), as("f2", "free")];
      assert.deepEqual(await crowd(30, (n) => free[n % 3 === 0 ? 0 : 1]!), [20, 10]);
      assert.equal((await b!.post({ input: "another" }, as("calm", "paid"))).status, 200);
      const shed = (): Promise<number> =>
        counter(ferry.part, "ferry_shed_total", 'tier="free"', 'reason="rate"');
      await eventually(async () => (await shed()) >= 10);
      assert.equal(await shed(), 10);
    });

    test("the request log has one row for each request, and a trace holds from the request to the batch", async () => {
      const answers = await Promise.all(
        [a!, b!].map((door) =>
          door.post({ input: door.pid }, { ...as("traced", "paid"), traceparent: CALLER }),
        ),
      );
      const requests = await collector.seen("POST /v1/inference", 2);
      const queues = await collector.seen("queue stub", 2);
      const batches = collector.named("process stub");
      for (const answer of answers) {
        assert.equal(answer.status, 200, answer.text);
        const id = answer.json.task_id!;
        const request = requests.find(({ attributes }) => attributes["ferry.task.id"] === id)!;
        assert.equal(request.traceId, CALLER.slice(3, 35));
        const queue = queues.find(({ attributes }) => attributes["messaging.message.id"] === id)!;
        assert.equal(queue.parentId, request.spanId);
        const batch = batches.find(({ spanId }) => spanId === request.links[0]!.spanId)!;
        assert.ok(batch.links.some(({ spanId }) => spanId === queue.spanId));
        let rows: readonly unknown[] = [];
        await eventually(async () => {
          rows = await postgres.sql`SELECT id FROM ferry_requests WHERE id = ${id}`;
          return rows.length > 0;
        });
        assert.equal(rows.length, 1);
      }
      // In Redis its end is looked up later.
      if (kind === "memory") {
        const id = await a!.accept({ input: "accepted" }, as("traced", "paid"));
        const outcome = async (): Promise<unknown> =>
          (await postgres.sql`SELECT outcome FROM ferry_requests WHERE id = ${id}`)[0]?.["outcome"];
        await eventually(async () => (await outcome()) === "SUCCESS", 20_000);
      }
      const count = async (user: string): Promise<number> => {
        const [row] = await postgres.sql`SELECT count(*) AS n FROM ferry_requests WHERE tenant = ${user}`;
        return Number(row!["n"]);
      };
      await eventually(async () => (await count("eager")) >= 45);
      const rows = (await count("eager")) + (await count("f1")) + (await count("f2"));
      assert.equal(rows, 75 + ferry.repeated);
    });
  });

  describe(`protocols, ${kind}`, () => {
    const stack = new AsyncDisposableStack();
    let worker: OpenWorker;
    let ferry: Several;
    let [a, b]: Door[] = [];
    let grpcUrl = "";

    before(async () => {
      const folder = stack.use(await Folder.make());
      const tensors = stack.use(await OipServer.listen(echo));
      worker = stack.use(
        await OpenWorker.listen(async ({ request, response, body }) => {
          const text = await body();
          if (request.url === "/v1/stream") {
            response.writeHead(200, { "content-type": "text/event-stream" }).write("data: one\n\n");
            return;
          }
          const size = request.headers.authorization?.length ?? 0;
          if (request.url !== "/v1/embeddings") return void response.end(`${request.method} ${text} ${size}`);
          const { input } = JSON.parse(text) as { input: string[] };
          const data = input.map((each, index) => ({
            object: "embedding",
            index,
            embedding: [each.length, size],
          }));
          response.setHeader("content-type", "application/json");
          response.end(
            JSON.stringify({
              object: "list",
              data,
              model: "m",
              usage: { prompt_tokens: 1, total_tokens: 1 },
            }),
          );
        }),
      );
      // Clients' credentials are never in Redis.
      const forwards = { backend: { forwardAuthorization: kind === "memory" }, timeouts: patient };
      const models = [
        openModel([`${worker.url}/v1/embeddings`], forwards),
        { name: "m", backend: { kind: "grpc", workers: [tensors.url] }, timeouts: patient },
      ];
      const more = { grpc: { listen: "127.0.0.1:0" }, admission: { mode: "off" } };
      ferry = stack.use(await Several.start(await engineConfig(kind, stack, folder, models, more)));
      await eventually(async () => (await ferry.part.health()).healthy_workers === 2);
      [a, b] = ferry.doors();
      grpcUrl = String((await ferry.part.line(({ msg }) => msg === "ready"))["grpc"]);
    });
    after(() => stack.disposeAsync());

    test("the openai SDK: batches with the caller's own credential", async () => {
      const clients = ["first", "the second"].map(
        (apiKey) => new OpenAI({ baseURL: `${ferry.part.url}/v1`, apiKey, maxRetries: 0 }),
      );
      const asked = Array.from({ length: 24 }, async (_, n) => {
        const { apiKey } = clients[n % 2]!;
        const input = "x".repeat(1 + n);
        const { data } = await clients[n % 2]!.embeddings.create({
          model: "open",
          input: [input, `${input}y`],
          encoding_format: "float",
        });
        const size = kind === "memory" ? `Bearer ${apiKey}`.length : 0;
        assert.deepEqual(
          data.map(({ embedding }) => embedding),
          [
            [n + 1, size],
            [n + 2, size],
          ],
        );
      });
      await Promise.all(asked);
    });

    test("what no batch is for goes to a worker from either gateway, as it came and as it is made", async () => {
      for (const door of [a!, b!]) {
        const answer = await door.post("{}", bearer("me"), "/v1/chat/completions");
        const size = kind === "memory" ? "Bearer me".length : 0;
        assert.deepEqual([answer.status, answer.text], [200, `POST {} ${size}`]);
      }
      const arrived = worker.arrival();
      const asking = get(`${ferry.part.url}/v1/stream`, { agent: false });
      asking.on("error", () => {});
      const [stream] = (await once(asking, "response")) as [IncomingMessage];
      const [first] = (await once(stream, "data")) as [Buffer];
      assert.equal(String(first), "data: one\n\n");
      const { closed } = await arrived;
      stream.destroy();
      // The worker is told when its reader is gone.
      await closed;
    });

    test("a worker that is drained gets nothing from any gateway while there is another", async () => {
      const { host } = new URL(worker.url);
      await using other = await OpenWorker.listen(({ response }) => void response.end("other"));
      const url = `${other.url}/v1/embeddings`;
      const admin = { method: "POST", headers: { "content-type": "application/json" } };
      const added = await fetch(`${ferry.part.adminUrl}/internal/workers`, {
        ...admin,
        body: JSON.stringify({ model: "open", url }),
      });
      assert.equal(added.status, 201, await added.text());
      const path = `/internal/workers/${encodeURIComponent(host)}`;
      assert.equal((await ferry.part.admin(`${path}/drain`, "POST")).status, 200);
      const chat = async (door: Door): Promise<string> =>
        (await door.post("{}", {}, "/v1/chat/completions")).text;
      // Gateways hear of it at once; on Redis they know the workers of the config.
      if (kind === "memory") {
        for (const door of [a!, b!]) await eventually(async () => (await chat(door)) === "other");
        for (const door of [a!, b!, a!, b!]) assert.equal(await chat(door), "other");
      }
      assert.equal((await ferry.part.admin(`${path}/resume`, "POST")).status, 200);
      const gone = await ferry.part.admin(
        `/internal/workers/${encodeURIComponent(new URL(other.url).host)}`,
        "DELETE",
      );
      assert.ok(gone.status === 204 || gone.status === 202, gone.text);
      for (const door of [a!, b!]) await eventually(async () => (await chat(door)) === "POST {} 0");
    });

    test("tensors over gRPC and over HTTP, with a connection for each call", async () => {
      for (let n = 0; n < 6; n++) {
        using client = new OipClient(new URL(grpcUrl.replace(/^\w+:/, "http:")).host);
        const inputs = [{ name: "text", datatype: "BYTES", shape: [1] }];
        const sent = rawFromJson(JSON.stringify([`grpc ${n}`]), "BYTES");
        const answer = await client.infer({ model_name: "m", inputs, raw_input_contents: [sent] });
        const raw = answer.raw_output_contents![0]!;
        assert.equal(raw.subarray(4).toString(), `grpc ${n}`);
      }
      for (const door of [a!, b!]) {
        const inputs = [{ name: "text", datatype: "BYTES", shape: [1], data: [`http ${door.pid}`] }];
        const answer = await door.post({ inputs }, {}, "/v2/models/m/infer");
        assert.equal(answer.status, 200, answer.text);
        assert.match(answer.text, new RegExp(`http ${door.pid}`));
      }
    });
  });
}

test("with TLS and HTTP/2, as with one", async () => {
  using authority = new Authority();
  const { certFile, keyFile } = authority.issue();
  const model = { name: "demo", backend: { kind: "simulated", workers: 1, baseMs: 1 } };
  await using ferry = await Several.start({ models: [model], tls: { certFile, keyFile } });
  assert.match(ferry.part.url, /^https:/);
  const { certFile: caFile } = authority.own;
  for (const [i, way] of ["--http2", "--http1.1", "--http2", "--http1.1"].entries()) {
    const words = ["-s", way, "--cacert", caFile, "--json", `{"input":"${i}"}`, "-w", " %{http_version}"];
    const { stdout } = await promisify(execFile)("curl", [...words, `${ferry.part.url}/v1/inference`]);
    assert.match(stdout, way === "--http2" ? /"SUCCESS".* 2$/s : /"SUCCESS".* 1\.1$/s);
  }
  await eventually(async () => (await counter(ferry.part, "ferry_requests_total", 'code="200"')) === 4);
});
