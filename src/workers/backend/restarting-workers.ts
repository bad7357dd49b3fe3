/** Workers that this process starts itself, each a child that may die: as many as are wanted, more or fewer later. */
import type { Backend, Worker } from "./backend.ts";
import { freeNumber } from "./names.ts";
import { type Child, RestartingWorker, type Surroundings } from "./restart.ts";

export interface Offspring {
  /** What they are called: `python-1`, … */
  readonly kind: string;
  /** Of those at the start. */
  readonly numbers: readonly number[];
  readonly startTimeoutMs: number;
  /** The next life of the worker of that name and number, counted from 1. */
  bear(name: string, number: number): Child;
}

export class RestartingWorkers implements Backend {
  readonly #offspring: Offspring;
  readonly #around: Surroundings;
  readonly #workers: RestartingWorker[] = [];
  /** Ready, or on their way there: a name is taken as long as somebody has it. */
  readonly #named = new Set<RestartingWorker>();
  #stopped = false;

  constructor(offspring: Offspring, around: Surroundings) {
    this.#offspring = offspring;
    this.#around = around;
    for (const number of offspring.numbers) this.#workers.push(this.#make(number));
  }

  get workers(): readonly RestartingWorker[] {
    return this.#workers;
  }

  /** Starts all at once; when one cannot start, ends the others and says why. */
  async start(): Promise<void> {
    try {
      await Promise.all(this.#workers.map((worker) => worker.start()));
    } catch (error) {
      await this.stop();
      throw error;
    }
  }

  async stop(): Promise<void> {
    this.#stopped = true;
    await Promise.all([...this.#named].map((worker) => worker.stop()));
  }

  async grow(): Promise<RestartingWorker> {
    if (this.#stopped)
      throw new Error(`no ${this.#offspring.kind} worker can be added: the model is stopped`);
    const worker = this.#make(freeNumber(this.#offspring.kind, [...this.#named]));
    try {
      await worker.start();
    } catch (error) {
      this.#named.delete(worker);
      throw error;
    }
    this.#workers.push(worker);
    return worker;
  }

  async retire(worker: Worker): Promise<void> {
    const at = this.#workers.findIndex((each) => each === worker);
    if (at < 0) return;
    const [retired] = this.#workers.splice(at, 1);
    await retired!.stop();
    this.#named.delete(retired!);
  }

  #make(number: number): RestartingWorker {
    const { kind, startTimeoutMs } = this.#offspring;
    const name = `${kind}-${number}`;
    const bear = (): Child => this.#offspring.bear(name, number);
    const worker = new RestartingWorker(name, bear, startTimeoutMs, this.#around);
    this.#named.add(worker);
    return worker;
  }
}
