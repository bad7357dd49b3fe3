/**
 * `ferry check`: reads a config file and says everything that is wrong with it. Starts nothing and
 * calls nobody.
 */
import { capacityPerSecond, count, countWorkers, plural } from "../banner.ts";
import { formatProblems, loadConfig } from "../config-load.ts";
import type { Config } from "../config.ts";
import { printable } from "../terminal.ts";
import { expectNoWords, type Call, type Command, type Console } from "./command.ts";
import { defaultFile } from "./config-file.ts";

export const check: Command = {
  summary: "check a config file without starting anything",
  usage: "check [-c FILE] [--json]",
  examples: [
    { line: "ferry check -c ferry.yaml", doc: "every mistake at once, with its line" },
    { line: "ferry check -c ferry.yaml --json", doc: "one object, for scripts" },
  ],
  flags: {
    config: { type: "string", short: "c", value: "FILE", doc: "the config file; default ./ferry.yaml" },
    json: { type: "boolean", doc: "one JSON object on stdout" },
  },

  async run(call: Call, console: Console): Promise<number> {
    expectNoWords(call);
    const file = call.text("config") ?? defaultFile;
    const { config, problems = [], warnings } = loadConfig(file, console.env);
    if (call.is("json")) {
      const facts = config === undefined ? {} : factsOf(config);
      console.out(`${JSON.stringify({ file, valid: config !== undefined, ...facts, problems, warnings })}\n`);
    } else if (config === undefined) {
      console.out(formatProblems(problems));
      console.out(`${plural(problems.length, "problem")}, nothing was started.\n`);
    } else {
      console.err(formatProblems(warnings.map((each) => ({ ...each, message: `warning: ${each.message}` }))));
      console.out(`${printable(file)} is valid: ${summary(config)}\n`);
    }
    return config === undefined ? 1 : 0;
  },
};

/** `1 model, 4 workers, up to 2,560 req/s, tiers enterprise > paid > free` */
function summary(config: Config): string {
  const { models, workers, capacityPerSecond: capacity, tiers } = factsOf(config);
  const rate =
    capacity === null ? "capacity is learned from traffic" : `up to ${count(Math.floor(capacity))} req/s`;
  return `${plural(models, "model")}, ${plural(workers, "worker")}, ${rate}, tiers ${tiers.join(" > ")}`;
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
