/**
 * Writes what can be derived from the table of settings: `ferry.example.yaml` and
 * `docs/configuration.md`.
 *
 *   node scripts/generate-docs.ts           write them
 *   node scripts/generate-docs.ts --check   exit 1 when one of them is stale
 *
 * `test/app/config.test.ts` calls `staleDocs`, so a changed table cannot be committed without its documents.
 */
import { readFileSync, writeFileSync } from "node:fs";
import { settingRows, settings, type SettingRow } from "../src/app/config/config.ts";
import { needsRestart } from "../src/app/config/diff.ts";
import { REMOVED } from "../src/app/config/removed.ts";
import type { SettingFields, Leaf, Setting } from "../src/app/config/kinds.ts";

interface Generated {
  /** From the root of the checkout. */
  readonly path: string;
  readonly text: string;
}

export function generateDocs(): Generated[] {
  return [
    { path: "ferry.example.yaml", text: exampleFile() },
    { path: "docs/configuration.md", text: configurationPage() },
  ];
}

/** The generated files that differ from what is on disk. */
export function staleDocs(): string[] {
  return generateDocs()
    .filter(({ path, text }) => onDisk(path) !== text)
    .map(({ path }) => path);
}

function onDisk(path: string): string | undefined {
  try {
    return readFileSync(rooted(path), "utf8");
  } catch {
    return undefined;
  }
}

function rooted(path: string): URL {
  return new URL(`../${path}`, import.meta.url);
}

// ── ferry.example.yaml ──────────────────────────────────────────────────────────────────────────

const exampleHead = `# Every setting of Ferry with its default. As it stands it starts a simulated GPU.
# A setting that is commented out has no default, or is another way. Paths are relative to this file.
# \${NAME} and \${NAME:-default} come from the environment; $\${ is a plain \${.
# Check a file: ferry check -c FILE. Generated from src/app/config/config.ts by scripts/generate-docs.ts.
`;

function exampleFile(): string {
  const sections = Object.entries(settings.fields).map(([name, setting]) =>
    exampleOf(name, setting).join("\n"),
  );
  return `${exampleHead}\n${sections.join("\n\n")}\n`;
}

/** The lines of one setting, not indented. */
function exampleOf(name: string, setting: Setting): string[] {
  switch (setting.type) {
    case "leaf":
      return leafLines(name, setting);
    case "group": {
      const lines = fieldLines(setting.fields);
      const nothingOn = setting.absent || lines.every((line) => line.startsWith("#"));
      const head = [`# ${setting.doc}`, nothingOn ? `# ${name}:` : `${name}:`];
      return [...head, ...(nothingOn ? lines.map((line) => `#   ${uncommented(line)}`) : indented(lines))];
    }
    case "named":
      return [
        `# ${setting.doc}`,
        `${name}:`,
        ...setting.fallback.flatMap((each, index) => {
          const lines = fieldLines(setting.fields);
          // The words are the same for each, so the first has them for all.
          const wanted = index === 0 ? lines : lines.filter((line) => !/^# (?!\w+:)/.test(line));
          return indented([`${each}:`, ...indented(wanted)]);
        }),
      ];
    case "list": {
      const each = setting.each as Setting;
      if (each.type === "leaf") {
        const example = each.example || each.defaultText;
        return [`# ${setting.doc}`, `${setting.min === 0 ? "# " : ""}${name}: [${example}]`];
      }
      const lines = each.type === "group" ? fieldLines(each.fields) : [];
      const first = lines.findIndex((line) => !line.startsWith("#"));
      const dashed = lines.map((line, index) =>
        index < first ? line : `${index === first ? "- " : "  "}${line}`,
      );
      return [`# ${setting.doc}`, `${name}:`, ...indented(dashed)];
    }
    case "one-of": {
      const variants = Object.entries(setting.variants).toReversed();
      const shown = variants.filter(([kind]) => kind === setting.fallback);
      const others = variants.filter(([kind]) => kind !== setting.fallback);
      return [...shown, ...others].flatMap(([kind, { doc, fields }], index) => {
        const lines = [`# ${doc}`, `${name}:`, ...indented([`kind: ${kind}`, ...fieldLines(fields)])];
        return index === 0 ? [`# ${setting.doc}`, ...lines] : commented(lines, "");
      });
    }
  }
}

function fieldLines(fields: SettingFields): string[] {
  return Object.entries(fields).flatMap(([name, setting]) => exampleOf(name, setting));
}

function leafLines(name: string, leaf: Leaf<unknown>): string[] {
  const facts = [leaf.unit, leaf.bounds].filter((fact) => fact !== "").join(", ");
  const comment = `# ${leaf.doc}${facts === "" ? "" : ` (${facts})`}`;
  const value = leaf.defaultText === "" ? leaf.example : leaf.defaultText;
  // To YAML a colon at the end begins a map.
  const line = `${name}: ${value.endsWith(":") ? JSON.stringify(value) : value}`;
  const on = leaf.need === "required" || leaf.defaultText !== "";
  return [comment, on ? line : `# ${line}`];
}

function indented(lines: readonly string[]): string[] {
  return lines.map((line) => `  ${line}`);
}

function commented(lines: readonly string[], note: string): string[] {
  return lines.map(
    (line, index) => `# ${index === 0 ? note : ""}${line.replace(/^# /, index === 0 ? "" : "# ")}`,
  );
}

function uncommented(line: string): string {
  return line.replace(/^# (?=\w+:)/, "");
}

// ── docs/configuration.md ───────────────────────────────────────────────────────────────────────

const pageHead = `# Configuration

Ferry reads one YAML file: the one named by \`-c\`, else \`./ferry.yaml\`, else it runs a built-in demo.
\`ferry check -c ferry.yaml\` reports every mistake at once, with line and column, and starts nothing.

- Names end in their unit: \`Ms\`, \`Bytes\`, \`PerMinute\`. Values are plain numbers.
- \`\${NAME}\` in a value comes from the environment, \`\${NAME:-default}\` has a way out, \`$\${\` is a plain \`\${\`.
- Relative paths start from the folder of the config file.
- An unknown or repeated name is a mistake, never ignored.

## Examples

The smallest file: one model behind a fixed HTTP batch API on two GPUs.

\`\`\`yaml
models:
  - name: embed
    backend: { kind: http, workers: [http://gpu-1:9000/infer, http://gpu-2:9000/infer] }
\`\`\`

A Python function \`def batchstring(inputs): return outputs\` in \`model.py\`, one process for each of four GPUs:

\`\`\`yaml
models:
  - name: classify
    backend: { kind: python, function: model.py:batchstring, workers: 4 }
    maxBatchSize: 32
\`\`\`

Open to a network, with limits for its tiers, tasks that survive a restart, and a token for operators:

\`\`\`yaml
listen: 0.0.0.0:8080
admin: { listen: 0.0.0.0:8081, token: \${FERRY_ADMIN_TOKEN} }
engine: { dataDir: /var/lib/ferry }
models:
  - name: embed
    backend: { kind: http, workers: [http://gpu-1:9000/infer] }
    timeouts: { queueMs: 1000, workerMs: 2000, totalMs: 2500 }
tiers:
  paid: {}
  free: { ratePerMinute: 1000 }
auth: { anonymousTier: free }
\`\`\`

Several machines that share their tasks through Redis: gateways take requests, batchers run them.
\`ferry serve --role gateway\` and \`ferry serve --role batcher\` read the same file.

\`\`\`yaml
listen: 0.0.0.0:8080
engine:
  kind: redis
  nodes: [redis-1:6379, redis-2:6379, redis-3:6379]
  password: \${REDIS_PASSWORD}
zone: \${ZONE:-a}
models:
  - name: embed
    backend: { kind: http, workers: [http://gpu-1:9000/infer, http://gpu-2:9000/infer] }
\`\`\`

\`ferry.example.yaml\` holds every setting with its default.

## Settings

\`[]\` stands for each of a list, \`NAME\` for a name you choose. "–" as default: there is none. A reload
(\`SIGHUP\`, docs/operations.md) applies a change, except for settings marked ↻, which need a restart.
`;

const pageTail = `
## Rules between settings

| rule | if not |
|---|---|
| \`timeouts.totalMs\` ≥ \`timeouts.workerMs\` + \`maxWaitMs\` | nothing could be answered in time |
| \`maxWaitMs\` < \`timeouts.queueMs\` | tasks could time out while they wait for others |
| \`retry.maxMs\` ≥ \`retry.baseMs\`, \`health.maxEjectMs\` ≥ \`health.ejectMs\` | the longest is shorter than the first |
| \`limits.headersTimeoutMs\` ≤ \`limits.requestTimeoutMs\` | the header is part of the request |
| \`limits.maxBodyBytes\` ≤ \`limits.maxQueuedBytes\` | the largest request could never be queued |
| model names differ; no worker URL is listed twice | a worker would get two batches at once |
| \`listen\` and \`admin.listen\` do not meet | one of them could not start |
| \`admin.listen\` on loopback, or \`admin.token\` set | anyone who reaches the port could replay tasks |
| \`auth.anonymousTier\` is one of \`tiers\` | there would be no queue for its tasks |
| \`engine.kind: redis\` has either \`url\` or \`nodes\`; \`username\` and \`password\` go with \`nodes\` | nobody could tell which one holds |
| \`engine.waitTimeoutMs\` ≤ \`engine.commandTimeoutMs\` | the connection would be closed while a write waits for a replica |
| \`engine.leaseMs\` ≥ 2 × \`engine.commandTimeoutMs\` | one renewal that times out would lose the lease |
| \`limits.drainMs\` > \`timeouts.totalMs\` (a warning) | a stop could cut off requests in progress |
| \`limits.maxQueued\` ≥ \`maxBatchSize\` (a warning) | no batch could ever be full |
| \`maxBatchTokens\` and \`maxBatchBytes\` ≥ \`maxBatchSize\` (a warning) | the same: a task counts as at least 1 |

## What Redis is asked at the start

\`ferry serve\`, and \`ferry check --probe\`, ask every primary how it is set up.

| what | then |
|---|---|
| older than Redis 7.0 or Valkey 7.2; \`INFO\` not allowed; a replica; a Cluster whose state is not ok | refused |
| \`maxmemory-policy\` is not \`noeviction\` | refused, as a full server would drop accepted tasks; a warning while \`maxmemory\` is 0 |
| no replica is connected | refused with \`durability: replica\`, a warning with \`auto\` |
| neither \`appendonly\` nor snapshots, or snapshots alone | a warning: accepted tasks do not survive a restart of Redis |
| \`maxmemory\` is 0, or more than 80 % of it is used | a warning |
| the last write to the append-only file, or the last snapshot, failed | a warning |
| \`min-replicas-to-write\` is 0 with \`durability: replica\`, or is more than the replicas that are connected | a warning |

Each line says what is set, why it matters and the exact command that changes it.

## Removed settings

Ferry refuses to start with one of these, and says what the table says. Delete the line.

| setting | what applies now |
|---|---|
`;

function configurationPage(): string {
  const single = settingRows.filter((row) => !/[.[]/.test(row.path));
  const sections = [`\n### ${single.map((row) => row.path).join(", ")}\n\n${tables(single)}`];
  for (const [name, setting] of Object.entries(settings.fields)) {
    if (setting.type === "leaf") continue;
    const rows = settingRows.filter((row) => new RegExp(`^${name}[.[]`).test(row.path));
    sections.push(`\n### ${name}\n\n${setting.doc}\n\n${tables(rows)}`);
  }
  const removed = [...REMOVED].map(([path, why]) => `| \`${path}\` | ${cell(sentence(why))} |\n`);
  return `${pageHead}${sections.join("")}${pageTail}${removed.join("")}`;
}

/** One table for what always holds, one for each kind of backend or engine, or for the kinds that share settings. */
function tables(rows: readonly SettingRow[]): string {
  const together = [...new Set(rows.map((row) => row.kinds.join(" or ")))];
  const parts = together.map((kinds) => {
    const some = rows.filter((row) => row.kinds.join(" or ") === kinds);
    const owner = some[0]?.path
      .replace(/\.tls\..*/, ".tls")
      .split(".")
      .at(-2);
    const head = kinds === "" ? "" : `With \`${owner}.kind\` ${kinds}:\n\n`;
    const lines = some.map(tableRow);
    const columns = "| setting | default | unit | bounds | what for |\n|---|---|---|---|---|";
    return `${head}${columns}\n${lines.join("\n")}\n`;
  });
  return parts.join("\n");
}

function tableRow({ path, leaf, doc }: SettingRow): string {
  const fallback = leaf.defaultText === "" ? "–" : `\`${leaf.defaultText}\``;
  const bounds = leaf.bounds === "" ? leaf.kind : leaf.bounds;
  const name = `\`${path}\`${needsRestart(path) ? " ↻" : ""}`;
  return `| ${[name, fallback, leaf.unit || "–", bounds, doc].map(cell).join(" | ")} |`;
}

function sentence(text: string): string {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
}

/** A bar inside a cell would end it. */
function cell(text: string): string {
  return text.replaceAll("|", "\\|");
}

if (import.meta.main) {
  const stale = staleDocs();
  if (!process.argv.includes("--check")) {
    for (const { path, text } of generateDocs()) writeFileSync(rooted(path), text);
  } else if (stale.length > 0) {
    console.error(`stale: ${stale.join(", ")}; run node scripts/generate-docs.ts`);
    process.exitCode = 1;
  }
}
