/**
 * Screening by `deny` patterns: `node bench/patterns.ts`, some seconds. With re2js beside it (`npm install --no-save re2js`)
 * it is measured as well, which takes minutes: that is why the engine is ours.
 *
 * What one text of 1 MiB costs the event loop: 50 patterns of the kind that operators write on prose, and patterns whose
 * automaton has very many states on texts written to visit them. Both engines take linear time. Ours stops after
 * `MAX_STEPS` and refuses the text; re2js has no such bound, and its automaton falls back to one that visits every state
 * for every character. One process per case, so that peak memory is that case's own.
 */
import { execFileSync } from "node:child_process";

const MIB = 1 << 20;
const words =
  "please summarise the following report about customers orders and previous instructions in plain english";

/** Park and Miller's generator: the same text in every run. */
function random(): () => number {
  let seed = 1;
  return () => (seed = (seed * 48271) % 2147483647);
}

function prose(): string {
  const next = random();
  const list = words.split(" ");
  let text = "";
  while (text.length < MIB) text += `${list[next() % list.length]} `;
  return text.slice(0, MIB);
}

function letters(from: string): string {
  const next = random();
  return Array.from({ length: MIB }, () => from[(next() >> 8) % from.length]).join("");
}

function fifty(): string[] {
  const kinds = [
    (n: number) => `(?i)ignore (all |any )?(previous|prior) rules ${n}`,
    (n: number) => `\\b${n}\\d{3}-\\d{4}-\\d{4}\\b`,
    (n: number) => `(?i)\\bproject[ _-]?zephyr${n}\\b`,
    (n: number) => `key${n}-[A-Za-z0-9]{20}`,
    (n: number) => `<script${n}[^>]*>`,
  ];
  return Array.from({ length: 50 }, (_, n) => kinds[n % kinds.length]!(n));
}

const cases: Record<string, { readonly patterns: readonly string[]; readonly text: () => string }> = {
  "50 patterns, prose": { patterns: fifty(), text: prose },
  "(a|b)*a(a|b){600}c, random a and b": { patterns: ["(a|b)*a(a|b){600}c"], text: () => `c${letters("ab")}` },
  "foo.{0,100}bar, random f and o": { patterns: ["foo.{0,100}bar"], text: () => `bar${letters("fo")}` },
  "(.*a){12}x, a": { patterns: ["(.*a){12}x"], text: () => `x\n${"a".repeat(MIB)}` },
  "(a+)+$, a!": { patterns: ["(a+)+$"], text: () => `${"a".repeat(MIB)}!` },
};

interface Engine {
  refuses(json: string): boolean;
}

const engines: Record<string, (patterns: readonly string[]) => Promise<Engine>> = {
  ferry: async (patterns) => new (await import("../src/core/screen.ts")).Screen(patterns),
  // One expression, tested: RE2Set is slower still.
  re2js: async (patterns) => {
    const { RE2JS } = (await import(RE2JS_MODULE)) as Re2js;
    const all = RE2JS.compile(patterns.map((pattern) => `(?:${pattern})`).join("|"), RE2JS.DOTALL);
    return { refuses: (json) => all.test(JSON.parse(json) as string) };
  },
};
/** A variable: its types are not here either. */
const RE2JS_MODULE = "re2js";
interface Re2js {
  readonly RE2JS: {
    readonly DOTALL: number;
    compile(pattern: string, flags: number): { test(text: string): boolean };
  };
}

const [engine, name] = process.argv.slice(2);
if (engine === undefined || name === undefined) {
  const installed = await import(RE2JS_MODULE).then(
    () => true,
    () => false,
  );
  for (const each of Object.keys(cases)) {
    for (const which of installed ? ["ferry", "re2js"] : ["ferry"]) {
      const args = [import.meta.filename, which, each];
      process.stdout.write(execFileSync(process.execPath, args, { encoding: "utf8" }));
    }
  }
} else {
  const { patterns, text } = cases[name]!;
  const json = JSON.stringify(text());
  const build = engines[engine]!;
  const screen = await build(patterns);
  const before = process.memoryUsage().rss;
  const runs = Array.from({ length: 3 }, () => {
    const from = performance.now();
    const refused = screen.refuses(json);
    return { ms: performance.now() - from, refused };
  });
  const [first, ...later] = runs.map(({ ms }) => ms.toFixed(0).padStart(6));
  const memory = (process.resourceUsage().maxRSS * 1024 - before) / MIB;
  process.stdout.write(
    `${name.padEnd(36)} ${engine}  first ${first} ms, then ${later.join(", ")} ms, ` +
      `+${memory.toFixed(0)} MB, ${runs[0]!.refused ? "refused" : "passed"}\n`,
  );
}
