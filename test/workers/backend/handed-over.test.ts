/** Two batches in the hands of a server behind HTTP or gRPC, where `pipeline: 2` hands over early. */
import assert from "node:assert/strict";
import type { Backend, Batch, Worker } from "../../../src/workers/backend/backend.ts";
import { HttpBackend } from "../../../src/workers/backend/http.ts";
import { SystemClock } from "../../../src/app/clock.ts";
import { Events } from "../../../src/observe/events.ts";
import { batchOf, outputsOf } from "../../contract/backend.ts";
import { OipServer } from "../../gateway/protocol/oip-service.ts";
import { backendFor as grpcBackend, echoing, never, TextWorker, texts } from "./grpc-stage.ts";
import { StubWorker, echo } from "./stub-worker.ts";
import { describe, test } from "./suite.ts";

/** A server that answers a batch when it is told to, by the text of the batch's first input. */
class Answers {
  readonly #waiting = new Map<string, PromiseWithResolvers<void>>();
  readonly #came = new Map<string, PromiseWithResolvers<void>>();

  #of(map: Map<string, PromiseWithResolvers<void>>, text: string): PromiseWithResolvers<void> {
    let found = map.get(text);
    if (found === undefined) map.set(text, (found = Promise.withResolvers()));
    return found;
  }

  /** The server has it. */
  came(text: string): Promise<void> {
    return this.#of(this.#came, text).promise;
  }

  answer(text: string): void {
    this.#of(this.#waiting, text).resolve();
  }

  /** At the server: it came, and waits for its answer. */
  async hold(text: string): Promise<void> {
    this.#of(this.#came, text).resolve();
    await this.#of(this.#waiting, text).promise;
  }
}

type Serve = (check: (worker: Worker, answers: Answers, backend: Backend) => Promise<void>) => Promise<void>;

const overHttp: Serve = async (check) => {
  const answers = new Answers();
  await using stub = await StubWorker.listen(async (call) => {
    await answers.hold(JSON.stringify(call.inputs[0]));
    if (!call.response.destroyed) await echo(call);
  });
  const health = { askMs: 1000, askTimeoutMs: 2000, failures: 3 };
  const options = { workers: [stub.url], maxReplyBytes: 1_000_000, health, tls: { reloadMs: 2000 } };
  const backend = new HttpBackend(options, { model: "m", clock: new SystemClock(), events: new Events() });
  await check(backend.workers[0]!, answers, backend);
  await backend.stop();
};

const overGrpc: Serve = async (check) => {
  const answers = new Answers();
  await using server = await OipServer.listen(async (request) => {
    const inputs = texts(request);
    await answers.hold(inputs[0]!);
    return echoing(request, inputs);
  });
  const backend = grpcBackend([server.url]);
  await check(new TextWorker(backend.workers[0]!), answers, backend);
  await backend.stop();
};

const first = (): Batch => batchOf(['"a"', '"b"']);
const second = (): Batch => batchOf(['"c"', '"d"', '"e"']);

for (const [name, serve] of Object.entries({ http: overHttp, grpc: overGrpc })) {
  describe(`${name}, two at once:`, () => {
    for (const order of [
      ['"a"', '"c"'],
      ['"c"', '"a"'],
    ]) {
      test(`each gets its own outputs when they are answered in the order ${order.join()}`, () =>
        serve(async (worker, answers) => {
          const batches = [first(), second()];
          const running = batches.map((batch) => worker.run(batch, never));
          await Promise.all([answers.came('"a"'), answers.came('"c"')]);
          for (const text of order) {
            answers.answer(text);
            await running[text === '"a"' ? 0 : 1];
          }
          for (const [at, batch] of batches.entries()) {
            const inputs = batch.tasks.map(({ input }) => input);
            assert.deepEqual(outputsOf(batch, await running[at]!), inputs);
          }
        }));
    }

    for (const aborted of [0, 1]) {
      test(`an abort of the ${["first", "second"][aborted]} leaves the other alone`, () =>
        serve(async (worker, answers) => {
          const batches = [first(), second()];
          const aborts = [new AbortController(), new AbortController()];
          const running = batches.map((batch, at) => worker.run(batch, aborts[at]!.signal));
          await Promise.all([answers.came('"a"'), answers.came('"c"')]);
          aborts[aborted]!.abort();
          assert.equal((await running[aborted]!).kind, "failed");
          answers.answer('"a"');
          answers.answer('"c"');
          const other = 1 - aborted;
          outputsOf(batches[other]!, await running[other]!);
          // And both places are free again.
          const more = [batchOf(['"a"']), batchOf(['"c"'])];
          const replies = await Promise.all(more.map((batch) => worker.run(batch, never)));
          more.forEach((batch, at) => outputsOf(batch, replies[at]!));
        }));
    }

    test("a third is one too many", () =>
      serve(async (worker, answers) => {
        const running = [first(), second()].map((batch) => worker.run(batch, never));
        await assert.rejects(async () => worker.run(first(), never), /two batches at a time/);
        answers.answer('"a"');
        answers.answer('"c"');
        await Promise.all(running);
      }));

    test("stopping ends both", () =>
      serve(async (worker, answers, backend) => {
        const running = [first(), second()].map((batch) => worker.run(batch, never));
        await Promise.all([answers.came('"a"'), answers.came('"c"')]);
        await backend.stop();
        for (const reply of await Promise.all(running)) assert.equal(reply.kind, "failed");
      }));
  });
}
