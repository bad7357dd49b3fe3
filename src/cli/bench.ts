/**
 * `ferry bench`: sends load to a running Ferry, measures latency as its callers see it, and checks goals. One probe
 * request first, then warm-up, measurement, and at most `--timeout` for the last replies. The admin listener's counters
 * are read when the measurement begins and ends. Ctrl-C prints the results so far and exits by the signal. Exit 1: a
 * goal was missed, nothing was served, a reply belonged to another request, or the server is unreachable.
 */
import { randomInt } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";
import { arch, availableParallelism, cpus, platform } from "node:os";
import { type Alarm, type Clock, SystemClock } from "../app/clock.ts";
import { version } from "../app/version.ts";
import { Random } from "../core/random.ts";
import { AdminClient, trustIn } from "./admin-client.ts";
import { type BenchPlan, benchFlags, commandLine, parsePlan } from "./bench-flags.ts";
import { type Saved, formatNumber, renderComparison, renderMarkdown, renderResult } from "./bench-report.ts";
import { type Sign, type Target, preflight } from "./bench/connection.ts";
import { Driver } from "./bench/driver.ts";
import { type Scrape, type ServerSide, serverSide } from "./bench/exposition.ts";
import { Requests } from "./bench/requests.ts";
import { type Result, parseResult, resultOf } from "./bench/results.ts";
import { type Call, type Command, type Console, Failure, UsageError } from "./command.ts";
import { type Paint, paint, printable, wantsColor } from "./terminal/terminal.ts";

export const bench: Command = {
  summary: "send load to a running Ferry and measure it",
  usage: "bench [URL] --rate N [--duration 30s] [--slo p99=150ms]… | bench --compare A B",
  examples: [
    {
      line: "ferry bench --rate 1800 --duration 30s --slo p99=150ms --slo errors=0",
      doc: "exit 1 when missed",
    },
    { line: "ferry bench --compare before.json after.json", doc: "two runs that --save kept" },
  ],
  flags: benchFlags,

  async run(call: Call, console: Console): Promise<number> {
    const colors = paint(wantsColor({ ...console, isTTY: console.outIsTTY, noColor: call.is("no-color") }));
    if (call.is("compare")) return compareFiles(call, console, colors);
    const plan = parsePlan(call, console);
    if (plan === undefined) return 1;
    const { result, signal } = await new Run(plan, commandLine(call), console, new SystemClock()).run();
    print(result, call, console, colors);
    save(result, call.text("save"), console);
    if (signal !== undefined) await dieBy(signal);
    return isGood(result) ? 0 : 1;
  },
};

const SIGNALS: readonly NodeJS.Signals[] = ["SIGINT", "SIGTERM", "SIGHUP"];

function isGood({ slos, counts, crossed }: Result): boolean {
  return slos.every(({ met }) => met) && counts.served > 0 && crossed === 0;
}

function print(result: Result, call: Call, console: Console, colors: Paint): void {
  if (call.is("json")) console.out(`${JSON.stringify(result)}\n`);
  else console.out(call.is("markdown") ? renderMarkdown(result) : renderResult(result, colors));
}

function save(result: Result, file: string | undefined, console: Console): void {
  if (file === undefined) return;
  try {
    writeFileSync(file, `${JSON.stringify(result, null, 1)}\n`);
    console.err(`saved ${printable(file)}\n`);
  } catch (error) {
    throw new Failure(`bench: --save ${printable(file)} failed (${(error as NodeJS.ErrnoException).code})`);
  }
}

function compareFiles(call: Call, console: Console, colors: Paint): number {
  const [a, b, extra] = call.words;
  if (a === undefined || b === undefined || extra !== undefined)
    throw new UsageError("--compare needs two files that --save wrote: --compare before.json after.json");
  const [before, after] = [readSaved(a), readSaved(b)];
  if (call.is("json")) console.out(`${JSON.stringify({ a: before.result, b: after.result })}\n`);
  else console.out(renderComparison(before, after, colors, call.is("markdown")));
  return 0;
}

function readSaved(name: string): Saved {
  let text: string;
  try {
    text = readFileSync(name, "utf8");
  } catch (error) {
    throw new Failure(`bench: ${printable(name)} cannot be read (${(error as NodeJS.ErrnoException).code})`);
  }
  const result = parseResult(text);
  if (result === undefined) throw new Failure(`bench: ${printable(name)} is not what --save writes`);
  return { name, result };
}

/** Flushes output before the process dies. */
async function dieBy(signal: NodeJS.Signals): Promise<void> {
  await new Promise<void>((resolve) => process.stdout.write("", () => resolve()));
  process.kill(process.pid, signal);
  await new Promise<never>(() => {});
}

class Run {
  readonly #plan: BenchPlan;
  readonly #command: string;
  readonly #console: Console;
  readonly #clock: Clock;
  readonly #requests: Requests;
  readonly #admins: readonly AdminClient[];
  #missing: string | undefined;

  constructor(plan: BenchPlan, command: string, console: Console, clock: Clock) {
    this.#plan = plan;
    this.#command = command;
    this.#console = console;
    this.#clock = clock;
    const { url, bodies, bytes, repeat, kinds } = plan;
    const headers = kinds.map((kind) => kind.headers ?? {});
    const path = url.pathname + url.search;
    this.#requests = new Requests({ authority: url.host, path, bodies, bytes, repeat, headers });
    this.#admins = plan.admins.map((base) => new AdminClient(base, plan.token, "bench", plan.certFile));
    if (plan.admins.length === 0) this.#missing = plan.noAdmin;
  }

  async run(): Promise<{ result: Result; signal: NodeJS.Signals | undefined }> {
    const plan = this.#plan;
    const clock = this.#clock;
    const target = await this.#target();
    checkSign(await preflight(target, this.#requests, plan.timeoutMs, clock), plan);
    const startedAt = new Date(clock.wall()).toISOString();
    const random = new Random(plan.seed ?? randomInt(2 ** 47));
    const driver = new Driver({
      ...plan,
      target,
      requests: this.#requests,
      warmMs: plan.warmupMs,
      measureMs: plan.durationMs,
      clock,
      draw: () => random.next(),
      cpuMs: () => {
        const { user, system } = process.cpuUsage();
        return (user + system) / 1000;
      },
    });
    const progress = new Progress(driver, plan.durationMs, this.#console, clock);
    let signal: NodeJS.Signals | undefined;
    const undo = onSignals((heard) => {
      // On the second signal, exit without a report.
      if (signal !== undefined) {
        undo();
        process.kill(process.pid, heard);
      }
      signal = heard;
      driver.interrupt();
    });
    driver.start();
    progress.start();
    const server = await this.#watch(driver, progress);
    await driver.ended;
    progress.stop();
    undo();
    const seconds = Math.max(driver.elapsedMs, 1) / 1000;
    const interrupted = signal !== undefined;
    const { account } = driver;
    const client = driver.client();
    const about = { startedAt, environment: environment(), command: this.#command, ...this.#about() };
    const result = resultOf({
      account,
      client,
      seconds,
      interrupted,
      server,
      serverMissing: server === undefined ? this.#missing : undefined,
      slos: plan.slos,
      about,
    });
    return { result, signal };
  }

  async #target(): Promise<Target> {
    const { url, certFile, certName } = this.#plan;
    const isTls = url.protocol === "https:";
    const host = url.hostname.replace(/^\[(.*)\]$/, "$1");
    const port = url.port === "" ? (isTls ? 443 : 80) : Number(url.port);
    const plain = { host, port, path: url.pathname };
    if (!isTls) return plain;
    const trust = await trustIn(certFile, "bench", certName);
    // SNI does not allow IP addresses.
    const servername = /^[\d.]+$|:/.test(host) ? "" : host;
    return { ...plain, tls: { ...trust, servername, ALPNProtocols: ["http/1.1"] } };
  }

  async #watch(driver: Driver, progress: Progress): Promise<ServerSide | undefined> {
    await driver.measuring;
    const before = await this.#scrape();
    if (before !== undefined)
      progress.maxBatchSize = serverSide(before, before, this.#plan.model).maxBatchSize || undefined;
    await driver.stopped;
    const after = before === undefined ? undefined : await this.#scrape();
    if (before === undefined || after === undefined || after.at <= before.at) return undefined;
    return serverSide(before, after, this.#plan.model);
  }

  async #scrape(): Promise<Scrape | undefined> {
    if (this.#admins.length === 0) return undefined;
    try {
      const texts = await Promise.all(this.#admins.map((admin) => admin.metrics()));
      return { at: this.#clock.now(), texts };
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      this.#missing = error.message.replace(/^bench: /, "");
      return undefined;
    }
  }

  #about() {
    const { url, model, load, warmupMs, timeoutMs, connections } = this.#plan;
    return {
      target: { url: url.href, model: model ?? null },
      uniqueInputs: this.#requests.isUnique,
      load: {
        kind: load.kind,
        rate: load.kind === "open" ? load.rate : null,
        callers: load.kind === "closed" ? load.callers : null,
        arrivals: load.kind === "open" ? load.arrivals : null,
        warmupSeconds: warmupMs / 1000,
        timeoutMs,
        connections,
      },
    };
  }
}

function environment(): Record<string, string | number> {
  return {
    ferry: version(),
    node: process.version,
    cpu: cpus()[0]?.model.trim() ?? "unknown",
    cores: availableParallelism(),
    platform: `${platform()} ${arch()}`,
  };
}

function onSignals(heard: (signal: NodeJS.Signals) => void): () => void {
  const undo = SIGNALS.map((signal) => {
    const listener = (): void => heard(signal);
    process.on(signal, listener);
    return () => process.off(signal, listener);
  });
  return () => undo.forEach((off) => off());
}

/** Capacity refusals are part of the measurement; any other refusal would repeat for every request. */
function checkSign(sign: Sign, { url, timeoutMs }: BenchPlan): void {
  const { status, error, message } = sign;
  const fail = (what: string): Failure => new Failure(printable(`bench: ${url.href} ${what}`));
  if (status === 0) {
    if (error === "ECONNREFUSED") throw fail("refused the connection; is ferry serve running?");
    if (error === "timeout") throw fail(`did not answer in ${timeoutMs / 1000} s`);
    if (/CERT|SIGNATURE|ISSUER|ALTNAME/.test(error))
      throw fail(`shows a certificate that cannot be trusted (${error}); name it with --ca FILE`);
    throw fail(`cannot be reached (${error === "" ? "it closed the connection" : error})`);
  }
  if (status === 401 || status === 403)
    throw fail(`answered ${status}: ${message || "no"}; give a key with --key or FERRY_API_KEY`);
  if (status === 404) throw fail(`answered 404: ${message || "there is no such path"}`);
  if (status >= 400 && status < 500 && status !== 408 && status !== 429)
    throw fail(
      `answered ${status}${error === "" ? "" : ` ${error}`}: ${message || "the request is not what it takes"}`,
    );
}

/**
 * Progress: one line that is overwritten on a terminal, elsewhere a line every 5 s.
 *
 *   12 s ━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 30 s   1,801 req/s   p99 131 ms   fill 56/64   refused 0
 */

const TTY_EVERY_MS = 250;
const PLAIN_EVERY_MS = 5000;
const BAR = 27;
/** Overwrites the line with wrapping off: a narrow terminal truncates it instead of showing two lines. */
const BEGIN = "\r\u001b[K\u001b[?7l";
const END = "\u001b[?7h";

class Progress {
  maxBatchSize: number | undefined;
  readonly #driver: Driver;
  readonly #durationMs: number;
  readonly #console: Console;
  readonly #clock: Clock;
  #alarm: Alarm | undefined;

  constructor(driver: Driver, durationMs: number, console: Console, clock: Clock) {
    this.#driver = driver;
    this.#durationMs = durationMs;
    this.#console = console;
    this.#clock = clock;
  }

  start(): void {
    const everyMs = this.#console.errIsTTY ? TTY_EVERY_MS : PLAIN_EVERY_MS;
    this.#alarm = this.#clock.at(this.#clock.now() + everyMs, () => {
      this.#say(this.line());
      this.start();
    });
  }

  stop(): void {
    this.#alarm?.cancel();
    if (this.#console.errIsTTY) this.#console.err(`${BEGIN}${END}`);
  }

  line(): string {
    const { account, elapsedMs } = this.#driver;
    if (elapsedMs <= 0) return `  warming up, ${formatNumber(-elapsedMs / 1000, 1)} s left`;
    const done = Math.min(1, elapsedMs / this.#durationMs);
    const filled = Math.round(done * BAR);
    const time = [elapsedMs, this.#durationMs].map((ms) => `${formatNumber(ms / 1000)} s`);
    const p99 = account.latency.percentileMs(99);
    const fill = account.meanFill;
    const bad = account.errors === 0 ? "" : `   errors ${formatNumber(account.errors)}`;
    return [
      `  ${time[0]} ${"━".repeat(filled)}${"╌".repeat(BAR - filled)} ${time[1]}`,
      `${formatNumber((account.served * 1000) / elapsedMs)} req/s`,
      ...(Number.isNaN(p99) ? [] : [`p99 ${formatNumber(p99)} ms`]),
      ...(Number.isNaN(fill)
        ? []
        : [`fill ${formatNumber(fill)}${this.maxBatchSize === undefined ? "" : `/${this.maxBatchSize}`}`]),
      `refused ${formatNumber(account.refused)}${bad}`,
    ].join("   ");
  }

  #say(line: string): void {
    this.#console.err(this.#console.errIsTTY ? `${BEGIN}${line}${END}` : `${line}\n`);
  }
}
