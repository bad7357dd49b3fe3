/**
 * Holds many connections to a server open and does nothing more, so that their memory can be measured.
 *
 *   node bench/hold.ts '<HoldSpec as JSON>'
 *
 *   held   every connection has sent one request that is not answered while we look
 *   idle   every connection has sent one request, has its answer, and keeps quiet since
 *
 * Prints one JSON line (`HoldState`) on stderr when all connections are in that state (or have ended),
 * and one more for every line on stdin. Ends when stdin does, or after `maxMs` in any case.
 */
import { createInterface } from "node:readline";
import { Connection, Markers, template, type Owner, type Target } from "../src/cli/bench/connection.ts";

export interface HoldSpec {
  readonly target: Target;
  readonly kind: "held" | "idle";
  readonly connections: number;
  readonly bodyBytes: number;
  readonly fields?: Readonly<Record<string, string>>;
  readonly maxMs: number;
}

export interface HoldState {
  readonly event: "hold";
  readonly open: number;
  readonly answered: number;
  readonly closed: number;
  /** Answers by HTTP status. */
  readonly statuses: Readonly<Record<string, number>>;
}

/** 2,000 a second: a backlog of 511 then survives a pause of the server of a quarter of a second. */
const openPerStep = 20;
const stepMs = 10;

class Hold implements Owner {
  readonly #spec: HoldSpec;
  readonly #open = new Set<Connection>();
  readonly #statuses: Record<string, number> = {};
  #answered = 0;
  #closed = 0;

  constructor(spec: HoldSpec) {
    this.#spec = spec;
  }

  async run(): Promise<void> {
    const { target, connections, bodyBytes, fields, kind, maxMs } = this.#spec;
    const request = template(target, bodyBytes, fields ?? {});
    const markers = new Markers();
    const end = setTimeout(() => process.exit(1), maxMs);
    for (let i = 0; i < connections; i++) {
      const connection = new Connection(target, this);
      this.#open.add(connection);
      const marker = markers.take();
      connection.send(request.front + marker + request.back, kind === "idle" ? marker : "", 0);
      if (i % openPerStep === openPerStep - 1) await pause(stepMs);
    }
    // A held request shows nothing while it is held; a second is ample for the last bytes to arrive.
    await pause(1000);
    if (kind === "idle") await this.#allAnswered();
    this.#print();
    for await (const _line of createInterface({ input: process.stdin })) this.#print();
    clearTimeout(end);
    process.exit(0);
  }

  async #allAnswered(): Promise<void> {
    while (this.#answered + this.#closed < this.#spec.connections) await pause(stepMs);
  }

  answered(connection: Connection): void {
    this.#answered += 1;
    const status = connection.crossed ? "crossed" : connection.status;
    this.#statuses[status] = (this.#statuses[status] ?? 0) + 1;
  }

  closed(connection: Connection): void {
    if (this.#open.delete(connection)) this.#closed += 1;
  }

  #print(): void {
    const state: HoldState = {
      event: "hold",
      open: this.#open.size,
      answered: this.#answered,
      closed: this.#closed,
      statuses: this.#statuses,
    };
    process.stderr.write(`${JSON.stringify(state)}\n`);
  }
}

function pause(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

if (import.meta.main) await new Hold(JSON.parse(process.argv[2] ?? "") as HoldSpec).run();
