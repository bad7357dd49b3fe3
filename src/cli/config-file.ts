/** The config of a command: the file named by -c, else ./ferry.yaml, else the built-in demo. */
import { existsSync, statSync } from "node:fs";
import { demoConfig, formatProblems, loadConfig, type Loaded } from "../app/config/load.ts";
import type { Config, Problem } from "../app/config/config.ts";
import { plural } from "./terminal/banner.ts";
import type { Call, Console, Flag } from "./command.ts";

export const defaultFile = "ferry.yaml";

export const configFlag: Flag = {
  type: "string",
  short: "c",
  value: "FILE",
  doc: "the config file; default ./ferry.yaml when it exists, else the built-in demo",
};

export interface Chosen {
  readonly config: Config;
  readonly warnings: readonly Problem[];
}

/** Rereads the config file of this call; undefined where there is none. */
export function loader(call: Call, { env }: Console): (() => Loaded) | undefined {
  const named = call.text("config");
  if (named === undefined && !existsSync(defaultFile)) return undefined;
  const path = named ?? defaultFile;
  return () => {
    // A pipe, as in `-c <(…)`, has been consumed; opening it again would block forever.
    if (statSync(path, { throwIfNoEntry: false })?.isFIFO() === true) {
      throw new Error(`${path} is a pipe, which can be read once; restart Ferry, or start it with a file`);
    }
    return loadConfig(path, env);
  };
}

/** Reports problems and their consequence on `err`; undefined when the file cannot be used. */
export function chooseConfig(call: Call, console: Console, consequence: string): Chosen | undefined {
  const named = call.text("config");
  if (named === undefined && !existsSync(defaultFile)) {
    return { config: demoConfig(console.errIsTTY ? "silent" : "info"), warnings: [] };
  }
  const loaded = loadConfig(named ?? defaultFile, console.env);
  if (loaded.problems === undefined) return loaded;
  console.err(formatProblems(loaded.problems));
  console.err(`${plural(loaded.problems.length, "problem")}, ${consequence}.\n`);
  return undefined;
}
