/**
 * One process of the load of bench/gpu: `ferry bench`'s driver with requests of token ids.
 *
 *   node bench/gpu/load.ts '<GpuLoad as JSON>'
 *
 * Prints one GpuLoaded as JSON on stdout, and one line on stderr when measuring begins.
 */
import { Driver, type LoadKind } from "../../src/cli/bench/driver.ts";
import type { HistogramState } from "../../src/cli/bench/histogram.ts";
import { SystemClock } from "../../src/app/clock.ts";
import { type Shape, TokenRequests } from "./requests.ts";

export interface GpuLoad {
  readonly host: string;
  readonly port: number;
  readonly path: string;
  readonly model: string;
  readonly tokens: number | string;
  readonly shape: Shape;
  readonly process: number;
  readonly load: LoadKind;
  readonly warmMs: number;
  readonly measureMs: number;
}

export interface GpuLoaded {
  readonly served: number;
  readonly errors: number;
  readonly refused: number;
  readonly crossed: number;
  /** Answers that were looked at, and carried their own sums. */
  readonly checked: boolean;
  readonly codes: Readonly<Record<string, number>>;
  readonly latency: HistogramState;
  /** In an open loop, where inputs differ in length. */
  readonly classes: Readonly<Record<string, HistogramState>>;
  readonly batched: number;
  readonly batches: number;
  readonly cpuShare: number;
  readonly late: number;
}

const spec = JSON.parse(process.argv[2]!) as GpuLoad;
const { host, port, path } = spec;
// In a closed loop a caller is of one kind for good.
const byClass = spec.load.kind === "open" && typeof spec.tokens === "string";
const requests = new TokenRequests({ ...spec, authority: `${host}:${port}`, byClass });
const driver = new Driver({
  target: { host, port, path },
  load: spec.load,
  kinds: requests.kinds,
  requests,
  warmMs: spec.warmMs,
  measureMs: spec.measureMs,
  timeoutMs: 30_000,
  connections: 2000,
  outstanding: 4000,
  clock: new SystemClock(),
  draw: Math.random,
  cpuMs: () => {
    const { user, system } = process.cpuUsage();
    return (user + system) / 1000;
  },
});
driver.start();
void driver.measuring.then(() => process.stderr.write("measuring\n"));
await driver.ended;
const { account } = driver;
const { cpuShare, late } = driver.client();
const loaded: GpuLoaded = {
  served: account.served,
  errors: account.errors,
  refused: account.refused,
  crossed: account.crossed,
  checked: account.echoes,
  codes: Object.fromEntries(account.codes),
  latency: account.latency.state(),
  classes: byClass
    ? Object.fromEntries(account.kinds.map(({ label, latency }) => [label, latency.state()]))
    : {},
  batched: account.batched,
  batches: account.batches,
  cpuShare,
  late,
};
process.stdout.write(`${JSON.stringify(loaded)}\n`);
