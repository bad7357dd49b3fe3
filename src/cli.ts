/**
 * The command line: finds the command, parses its flags, turns what happens into an exit code.
 *
 * Each command is loaded only when it is called, and after the compile cache is on, so `ferry help`
 * reads almost nothing. A wrong call says so on stderr with the usage, exit 2; a failure is one line
 * on stderr without a stack, exit 1. Only a bug shows a stack.
 */
import { enableCompileCache } from "node:module";
import { homedir } from "node:os";
import { join } from "node:path";
import type { Command, Console } from "./cli/command.ts";

interface Known {
  readonly summary: string;
  load(): Promise<Command>;
}

const commands: { readonly [name: string]: Known } = {
  serve: { summary: "run the gateway", load: async () => (await import("./cli/serve.ts")).serve },
  bench: {
    summary: "send load to a running Ferry and measure it",
    load: async () => (await import("./cli/bench.ts")).bench,
  },
  check: { summary: "check a config file", load: async () => (await import("./cli/check.ts")).check },
  dead: { summary: "look after dead letters", load: async () => (await import("./cli/dead.ts")).dead },
  keys: {
    summary: "make, list and revoke API keys",
    load: async () => (await import("./cli/keys.ts")).keys,
  },
  recover: {
    summary: "save what is readable of a damaged journal",
    load: async () => (await import("./cli/recover.ts")).recover,
  },
  plan: {
    summary: "how many workers a rate and a latency goal need",
    load: async () => (await import("./cli/plan.ts")).plan,
  },
  reload: {
    summary: "have a running Ferry read its config again",
    load: async () => (await import("./cli/reload.ts")).reload,
  },
  top: { summary: "watch a running Ferry", load: async () => (await import("./cli/top.ts")).top },
  workers: {
    summary: "add, drain and remove workers of a running Ferry",
    load: async () => (await import("./cli/workers.ts")).workers,
  },
  version: {
    summary: "print the version",
    load: async () => (await import("./cli/version.ts")).versionCommand,
  },
};

const overview = `Ferry: many single requests in, full GPU batches out.

  ferry serve                 # the demo: a simulated GPU on http://127.0.0.1:8080
  ferry check -c ferry.yaml   # every mistake at once, with its line

Usage: ferry COMMAND [FLAGS]

${Object.entries(commands)
  .map(([name, { summary }]) => `  ${name.padEnd(9)} ${summary}`)
  .join("\n")}
  help      ferry help COMMAND says more
`;

export async function main(args: readonly string[], console: Console): Promise<number> {
  const [first = "help", ...rest] = args;
  if (first === "--version") return run("version", rest, console);
  const asked = first === "help" ? rest[0] : undefined;
  if (first === "--help" || first === "-h" || (first === "help" && asked === undefined)) {
    console.out(overview);
    return 0;
  }
  return asked === undefined ? run(first, rest, console) : run(asked, ["--help"], console);
}

async function run(name: string, args: readonly string[], console: Console): Promise<number> {
  const { Failure, helpText, parseCall, UsageError } = await import("./cli/command.ts");
  let usage = "COMMAND [FLAGS]; ferry help lists the commands";
  try {
    const known = Object.hasOwn(commands, name) ? commands[name] : undefined;
    if (known === undefined) throw new UsageError(await unknownCommand(name));
    const command = await known.load();
    usage = command.usage;
    const call = parseCall(command.flags, args);
    if (call.is("help")) {
      console.out(helpText(name, command));
      return 0;
    }
    return await command.run(call, console);
  } catch (error) {
    if (error instanceof UsageError) {
      console.err(`ferry: ${error.message}\nUsage: ferry ${usage}\n`);
      return 2;
    }
    if (!(error instanceof Failure)) throw error;
    console.err(`ferry: ${error.message}\n`);
    return 1;
  }
}

async function unknownCommand(name: string): Promise<string> {
  const { didYouMean } = await import("./app/config/spelling.ts");
  const { printable } = await import("./cli/terminal/terminal.ts");
  const what = name.startsWith("-") ? "flag" : "command";
  const known = what === "flag" ? ["--help", "--version"] : [...Object.keys(commands), "help"];
  return `unknown ${what} ${printable(name.slice(0, 64))}${didYouMean(name, known)}`;
}

/** In the user's own folder: a cache in a shared one could be somebody else's code. */
function cacheCompiledCode(): void {
  try {
    enableCompileCache(join(process.env["XDG_CACHE_HOME"] ?? join(homedir(), ".cache"), "ferry"));
  } catch {
    // No home folder: then every start compiles.
  }
}

function processConsole(): Console {
  const { stdin, stdout, stderr, env } = process;
  const people = stdin.isTTY && stderr.isTTY;
  return {
    out: (text) => void (text !== "" && stdout.write(text)),
    err: (text) => void (text !== "" && stderr.write(text)),
    env,
    outIsTTY: stdout.isTTY,
    errIsTTY: stderr.isTTY,
    ...(people ? { ask: askPerson } : {}),
    ...(people && (env["CI"] ?? "") === "" ? { keys: hearKeys } : {}),
  };
}

async function askPerson(question: string): Promise<string> {
  const { createInterface } = await import("node:readline/promises");
  const lines = createInterface({ input: process.stdin, output: process.stderr });
  try {
    return await lines.question(question);
  } finally {
    lines.close();
  }
}

async function hearKeys(pressed: (key: string) => void): Promise<(() => void) | undefined> {
  const { listenToKeys } = await import("./cli/terminal/keyboard.ts");
  return listenToKeys(process, pressed);
}

if (import.meta.main) {
  cacheCompiledCode();
  // `ferry dead list | head` closes the pipe early; that is the reader's right, not an error.
  process.stdout.on("error", () => process.exit(0));
  // Whoever read our log is gone; that must not end a server with requests in its hands.
  process.stderr.on("error", () => {});
  const code = await main(process.argv.slice(2), processConsole());
  // A pipe takes 64 KiB; what waits behind them would be lost with the process.
  process.stdout.write("", () => process.exit(code));
}
