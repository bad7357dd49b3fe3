/**
 * `ferry check`: reads a config file, and the certificates that it names, and says everything that is wrong.
 * Starts nothing, and calls nobody unless `--probe` is given: then Redis is asked what `ferry serve` would ask
 * it at its start, names of DNS are looked up, and a connection to each http worker is tried.
 */
import { capacityPerSecond, count, countWorkers, plural } from "./terminal/banner.ts";
import { SystemClock } from "../app/clock.ts";
import { formatProblems, loadConfig } from "../app/config/load.ts";
import type { Config, Problem } from "../app/config/config.ts";
import { isDns, hasAddresses } from "../app/config/worker-addresses.ts";
import type { Probe } from "../engine/redis/client/probe.ts";
import { printable } from "./terminal/terminal.ts";
import { checkTls } from "./check-tls.ts";
import { expectNoWords, type Call, type Command, type Console } from "./command.ts";
import { defaultFile } from "./config-file.ts";

export const check: Command = {
  summary: "check a config file without starting anything",
  usage: "check [-c FILE] [--probe] [--json]",
  examples: [
    { line: "ferry check -c ferry.yaml", doc: "every mistake at once, with its line" },
    {
      line: "ferry check -c ferry.yaml --probe --json",
      doc: "also how Redis is set up and whether workers are there; one object, for scripts",
    },
  ],
  flags: {
    config: { type: "string", short: "c", value: "FILE", doc: "the config file; default ./ferry.yaml" },
    probe: { type: "boolean", doc: "connect to Redis and to http workers, and check how they are set up" },
    json: { type: "boolean", doc: "one JSON object on stdout" },
  },

  async run(call: Call, console: Console): Promise<number> {
    expectNoWords(call);
    const file = call.text("config") ?? defaultFile;
    const loaded = loadConfig(file, console.env);
    const probe = call.is("probe") ? await probeEngine(loaded.config) : undefined;
    const { config } = loaded;
    const keys = await checkKeys(file, config);
    const tls = await checkTls(file, config, call.is("probe"));
    const problems = [
      ...(loaded.problems ?? []),
      ...keys.problems,
      ...found(file, config, probe?.refuse),
      ...tls.problems,
    ];
    const warnings = [
      ...loaded.warnings,
      ...keys.warnings,
      ...found(file, config, probe?.warn),
      ...tls.warnings,
    ];
    const valid = problems.length === 0;
    if (call.is("json")) {
      const facts = config === undefined ? {} : factsOf(config);
      const redis = probe === undefined ? {} : { redis: probe.servers };
      const dns = tls.lookups.length === 0 ? {} : { dns: tls.lookups };
      console.out(`${JSON.stringify({ file, valid, ...facts, ...redis, ...dns, problems, warnings })}\n`);
      return valid ? 0 : 1;
    }
    if (config !== undefined)
      console.err(formatProblems(warnings.map((each) => ({ ...each, message: `warning: ${each.message}` }))));
    if (config === undefined || !valid) {
      console.out(formatProblems(problems));
      console.out(`${plural(problems.length, "problem")}, nothing was started.\n`);
      return 1;
    }
    console.out(`${printable(file)} is valid: ${summary(config)}\n`);
    for (const line of serverLines(probe)) console.out(`${line}\n`);
    for (const { worker, addresses } of tls.lookups)
      console.out(
        `${printable(worker)}: ${addresses.length === 0 ? "no address now" : addresses.join(", ")}\n`,
      );
    if (tls.asked > 0) console.out(`workers: ${tls.reached} of ${tls.asked} take connections\n`);
    if (call.is("probe") && probe === undefined && tls.asked === 0 && tls.lookups.length === 0)
      console.err("nothing to probe: engine.kind is memory, which needs nobody\n");
    return 0;
  },
};

/** What is wrong with the files of `auth`; loaded only where there are some. */
async function checkKeys(
  file: string,
  config: Config | undefined,
): Promise<Record<"problems" | "warnings", Problem[]>> {
  if (config?.auth.mode !== "required") {
    return { problems: [], warnings: [] };
  }
  const { checkAuthFiles } = await import("../app/credentials.ts");
  const { problems, warnings } = await checkAuthFiles(config);
  const at = ({ path, message }: { path: string; message: string }): Problem => ({ file, path, message });
  return { problems: problems.map(at), warnings: warnings.map(at) };
}

/** Loaded only now: a check without --probe needs no client. */
async function probeEngine(config: Config | undefined): Promise<Probe | undefined> {
  if (config?.engine.kind !== "redis") return undefined;
  const { probeRedis } = await import("../engine/redis/client/probe.ts");
  return probeRedis(config.engine, new SystemClock());
}

/** What Redis answered, as problems of the setting that leads to it. */
function found(file: string, config: Config | undefined, lines: readonly string[] = []): Problem[] {
  const engine = config?.engine;
  const path = engine?.kind === "redis" && engine.url === undefined ? "engine.nodes" : "engine.url";
  return lines.map((message) => ({ file, path, message }));
}

/** `redis 127.0.0.1:6379: redis 7.0.15, 1 replica, durability replica` */
function serverLines(probe: Probe | undefined): string[] {
  return (probe?.servers ?? []).map(({ address, facts }) => {
    const { product, version, replicas, durability } = facts;
    const what = `${product} ${printable(version)}, ${plural(replicas, "replica")}, durability ${durability}`;
    return `redis ${printable(address)}: ${what}`;
  });
}

/** `1 model, 4 workers, up to 2,560 req/s, tiers enterprise > paid > free` */
function summary(config: Config): string {
  const { models, workers, capacityPerSecond: capacity, tiers } = factsOf(config);
  const lookedUp = config.models.some(({ backend }) => hasAddresses(backend) && backend.workers.some(isDns));
  const fixed = workers > 0 || !lookedUp ? plural(workers, "worker") : "";
  const all = [fixed, lookedUp ? "workers by DNS" : ""].filter((each) => each !== "").join(" and ");
  const rate =
    capacity === null ? "capacity is learned from traffic" : `up to ${count(Math.floor(capacity))} req/s`;
  return `${plural(models, "model")}, ${all}, ${rate}, tiers ${tiers.join(" > ")}`;
}

function factsOf(config: Config) {
  // One unknown makes the sum unknown: half a capacity would mislead.
  let capacity: number | null = 0;
  for (const model of config.models) {
    const each = capacityPerSecond(model);
    capacity = each === undefined || capacity === null ? null : capacity + each;
  }
  return {
    models: config.models.length,
    workers: countWorkers(config),
    capacityPerSecond: capacity,
    tiers: config.tiers.map((tier) => tier.name),
  };
}
