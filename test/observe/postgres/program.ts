/** Where PostgreSQL's programs are, and as whom they run: it refuses to run as root. */
import { execFileSync } from "node:child_process";
import { globSync } from "node:fs";
import { join } from "node:path";

/** Debian keeps them away from PATH, one folder a version; the newest last. */
export function postgresProgram(name: string): string {
  const bin = globSync("/usr/lib/postgresql/*/bin").sort().at(-1);
  if (bin === undefined) throw new Error("PostgreSQL is not there; install it (Debian: postgresql)");
  return join(bin, name);
}

/** Undefined: as ourselves. For root, the user that its package makes. */
export function postgresUser(): { readonly uid: number; readonly gid: number } | undefined {
  if (process.getuid?.() !== 0) return undefined;
  const ask = (what: string): number => Number(execFileSync("id", [what, "postgres"], { encoding: "utf8" }));
  return { uid: ask("-u"), gid: ask("-g") };
}
