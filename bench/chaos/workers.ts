/**
 * The workers of a chaos run: HTTP endpoints in this process, outside of all that is killed, that answer a
 * batch after `serviceMs` with its own inputs. They remember what no part of Ferry could tell: how often
 * each marker was run, and which calls were cut off because their batcher was killed.
 */
import { setTimeout as pause } from "node:timers/promises";
import { StubWorker, type StubCall } from "../../test/e2e/stub-worker.ts";

export class Workers implements AsyncDisposable {
  readonly stubs: StubWorker[] = [];
  /** Marker → in how many batches it was sent to a worker. */
  readonly runs = new Map<string, number>();
  readonly #serviceMs: number;
  readonly #open = new Set<StubCall>();
  #calls = 0;

  private constructor(serviceMs: number) {
    this.#serviceMs = serviceMs;
  }

  static async start(count: number, serviceMs: number): Promise<Workers> {
    const workers = new Workers(serviceMs);
    for (let i = 0; i < count; i++) {
      const stub = await StubWorker.listen((call) => workers.#serve(stub, call));
      workers.stubs.push(stub);
    }
    return workers;
  }

  get calls(): number {
    return this.#calls;
  }

  /** Must be 1: a worker belongs to one batcher at a time. */
  get mostAtOnce(): number {
    return Math.max(...this.stubs.map(({ mostAtOnce }) => mostAtOnce));
  }

  get runTwice(): number {
    let twice = 0;
    for (const times of this.runs.values()) if (times > 1) twice++;
    return twice;
  }

  /**
   * The markers that were at a worker when `kill` ran and whose caller was gone afterwards. What a batcher
   * held but had not sent yet, or had just got the answer to, nobody outside can see.
   */
  async cutBy(kill: () => Promise<void>): Promise<string[]> {
    const open = [...this.#open];
    await kill();
    await pause(this.#serviceMs);
    return open.filter(({ abandoned }) => abandoned).flatMap(({ inputs }) => inputs.map(String));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await Promise.all(this.stubs.map((stub) => stub[Symbol.asyncDispose]()));
  }

  async #serve(stub: StubWorker, call: StubCall): Promise<void> {
    // A stub keeps its calls for tests that look at each; over minutes, that is too much.
    stub.calls.length = 0;
    this.#calls++;
    for (const input of call.inputs) this.runs.set(String(input), (this.runs.get(String(input)) ?? 0) + 1);
    this.#open.add(call);
    await pause(this.#serviceMs);
    this.#open.delete(call);
    if (!call.abandoned) call.echo();
  }
}
