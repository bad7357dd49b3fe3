/** Workers behind gRPC keep the contract, and what they are sent. */
import assert from "node:assert/strict";
import { setImmediate as turn } from "node:timers/promises";
import { status as codes } from "@grpc/grpc-js";
import { backendContract, batchOf, CRASH, outputsOf, REJECT } from "../../contract/backend.ts";
import { OipServer, status } from "../../gateway/protocol/oip-service.ts";
import {
  asRows,
  assertReply,
  backendFor,
  echo,
  echoing,
  never,
  TextBackend,
  texts,
  TextWorker,
  withServer,
} from "./grpc-stage.ts";
import { describe, test } from "./suite.ts";
import { TcpProxy } from "./tcp-proxy.ts";

backendContract(
  "grpc",
  async (mood, workers) => {
    const servers = await Promise.all(
      Array.from({ length: workers }, async () => {
        const server = await OipServer.listen(async (request) => {
          const inputs = texts(request);
          if (inputs.includes(REJECT)) throw status(codes.INVALID_ARGUMENT, "refused");
          if (inputs.includes(CRASH)) proxy.cut();
          if (inputs.includes(CRASH) || mood === "hang") return undefined;
          // Answers take a different number of turns, so that aborts hit every stage.
          for (let turns = inputs.join().length % 5; turns > 0; turns--) await turn();
          return echoing(request, mood === "short" ? inputs.slice(1) : inputs);
        });
        const proxy = await TcpProxy.to(server.port);
        return { server, proxy };
      }),
    );
    const urls = servers.map(({ proxy }) => `grpc://127.0.0.1:${proxy.port}`);
    return Object.assign(new TextBackend(backendFor(urls, { askReady: true })), {
      [Symbol.asyncDispose]: async () => {
        for (const { proxy, server } of servers) {
          await proxy[Symbol.asyncDispose]();
          await server[Symbol.asyncDispose]();
        }
      },
    });
  },
  { opaque: true },
);

describe("grpc, what is sent:", () => {
  test("the model's name at the worker, a deadline, credentials and the trace", () =>
    withServer(
      echo,
      async (worker, server) => {
        const batch = { ...asRows(batchOf(["1"])), timeoutMs: 2500, traceparent: "00-1-2-01" };
        assert.equal((await worker.run(batch, never)).kind, "answered");
        const [request] = server.requests;
        assert.equal(request!.model_name, "upstream");
        assert.equal(request!.model_version, "2");
        assert.equal(request!.id, batch.id);
        const metadata = server.metadata[0]!;
        assert.deepEqual(metadata.get("authorization"), ["Bearer s3cret"]);
        assert.deepEqual(metadata.get("traceparent"), ["00-1-2-01"]);
        assert.match(worker.name, /^127\.0\.0\.1:\d+$/);
      },
      { model: "upstream", version: "2", authorization: "Bearer s3cret" },
    ));

  test("the deadline is the worker's too", () =>
    withServer(
      (_, call) => void call.once("cancelled", () => {}),
      async (worker, server) => {
        const before = Date.now();
        let deadline: unknown;
        server.serve = (request, call) => {
          deadline = call.getDeadline();
          return echo(request, call);
        };
        await worker.run({ ...asRows(batchOf(["1"])), timeoutMs: 5000 }, never);
        const left = Number(deadline) - before;
        assert.ok(left > 4000 && left < 60_000, String(left));
      },
    ));

  test("one connection is kept for all batches, and an abort is told to the worker", async () => {
    await using server = await OipServer.listen(echo);
    await using proxy = await TcpProxy.to(server.port);
    const backend = backendFor([`grpc://127.0.0.1:${proxy.port}`]);
    const worker = new TextWorker(backend.workers[0]!);
    for (let round = 0; round < 20; round++) {
      const batch = batchOf([`${round}`, '"é"', "9223372036854775807"]);
      assert.deepEqual(outputsOf(batch, await worker.run(batch, never)), [
        `${round}`,
        '"é"',
        "9223372036854775807",
      ]);
    }
    assert.equal(proxy.connections, 1);
    const abort = new AbortController();
    const arrived = new Promise<void>((resolve) => {
      server.serve = (_, call) => {
        call.once("cancelled", () => gone());
        resolve();
        return undefined;
      };
    });
    let gone = (): void => {};
    const cancelled = new Promise<void>((resolve) => (gone = resolve));
    const running = worker.run(batchOf(["1"]), abort.signal);
    await arrived;
    abort.abort();
    assert.deepEqual(await running, { kind: "failed", message: "aborted", blame: "batch" });
    await cancelled;
    server.serve = echo;
    const batch = batchOf(["7"]);
    assert.deepEqual(outputsOf(batch, await worker.run(batch, never)), ["7"]);
    assert.equal(proxy.connections, 2, "a fresh one after an abort");
    await backend.stop();
  });

  test("a batch and a reply of several megabytes", () =>
    withServer(
      echo,
      async (worker) => {
        const batch = batchOf(Array.from({ length: 8 }, (_, at) => `"${String(at).repeat(1_000_000)}"`));
        const reply = await new TextWorker(worker).run(batch, never);
        assert.deepEqual(
          outputsOf(batch, reply),
          batch.tasks.map(({ input }) => input),
        );
      },
      { maxReplyBytes: 20_000_000 },
    ));

  test("tasks of another protocol are refused without a call", () =>
    withServer(echo, async (worker, server) => {
      const reply = await worker.run(batchOf(['"hello"']), never);
      assertReply(reply, "rejected", /speak the Open Inference Protocol/);
      assert.equal(server.requests.length, 0);
    }));
});
