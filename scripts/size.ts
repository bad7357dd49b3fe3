/**
 * How large the code is: lines and files by room, settings, exported names with more than one meaning.
 *
 *   node scripts/size.ts              this checkout
 *   node scripts/size.ts ../other     another one
 *
 * The server is all of src but the tools (commands other than `ferry serve`, bench, plan, demo, charts, terminal) and the
 * dashboard's page. Every line counts, comments and blank ones too.
 */
import { globSync, readFileSync } from "node:fs";
import { join } from "node:path";

const root = process.argv[2] ?? join(import.meta.dirname, "..");
const lines = (file: string): number => readFileSync(join(root, file), "utf8").split("\n").length - 1;
const SOURCE = "**/*.{ts,js,css,html,lua,py}";
const PAGE = /^src\/(observe\/)?dashboard\/page\//;
/** In today's layout, and in that of the checkouts before it. */
const TOOLS = /^src\/(cli|commands|terminal|bench|plan|chart|demo)\/(?!serve)/;

function kind(file: string): string {
  if (PAGE.test(file)) return "dashboard page";
  if (TOOLS.test(file)) return "tools";
  const [, room] = file.split("/");
  return `server: ${room.endsWith(".ts") || room === "cli" || room === "commands" ? "start" : room}`;
}

const rooms = new Map<string, { files: number; lines: number }>();
function count(room: string, file: string): void {
  const sum = rooms.get(room) ?? { files: 0, lines: 0 };
  rooms.set(room, { files: sum.files + 1, lines: sum.lines + lines(file) });
}
for (const file of globSync(`src/${SOURCE}`, { cwd: root }).sort()) {
  const room = kind(file);
  if (room.startsWith("server")) count("server", file);
  count(room, file);
}
for (const file of globSync(`test/${SOURCE}`, { cwd: root })) count("tests", file);
for (const [room, { files, lines: total }] of rooms) {
  console.log(`${room.padEnd(22)} ${String(total).padStart(7)} lines ${String(files).padStart(5)} files`);
}

/** Settings as docs/configuration.md lists them: a row each, its path in the first cell. */
const [settings] = readFileSync(join(root, "docs/configuration.md"), "utf8").split("## Removed settings");
const paths = settings.matchAll(/^\| `([a-zA-Z][\w.[\]]*)`(?: ↻)? \|/gm);
console.log(
  `${"settings".padEnd(22)} ${String(new Set(Array.from(paths, (row) => row[1])).size).padStart(7)}`,
);

const EXPORTED = /^export (?:abstract |async )*(?:function\*?|class|const|let|type|interface) (\w+)/gm;
const declaredIn = new Map<string, number>();
for (const file of globSync("src/**/*.ts", { cwd: root })) {
  const names = new Set(
    Array.from(readFileSync(join(root, file), "utf8").matchAll(EXPORTED), (found) => found[1]),
  );
  for (const name of names) declaredIn.set(name, (declaredIn.get(name) ?? 0) + 1);
}
const ambiguous = [...declaredIn].filter(([, files]) => files > 1).map(([name]) => name);
console.log(
  `${"names with 2 meanings".padEnd(22)} ${String(ambiguous.length).padStart(7)} ${ambiguous.join(" ")}`,
);
