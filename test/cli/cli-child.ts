/** The real bin/ferry as a child process, in a folder of its own. */
import { execFile } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after } from "node:test";
import { fileURLToPath } from "node:url";

export const bin = fileURLToPath(new URL("../../bin/ferry", import.meta.url));
export const folder = mkdtempSync(join(tmpdir(), "ferry-cli-"));
after(() => rmSync(folder, { recursive: true }));

export interface Ended {
  readonly code: number | string;
  readonly out: string;
  readonly err: string;
}

/** Runs to the end, in an empty folder unless told otherwise. */
export function run(
  file: string,
  args: readonly string[],
  env: NodeJS.ProcessEnv = {},
  cwd = folder,
): Promise<Ended> {
  return new Promise((resolve) => {
    execFile(file, args, { cwd, env: { ...process.env, ...env } }, (error, out, err) => {
      resolve({ code: error === null ? 0 : (error.code ?? String(error.signal)), out, err });
    });
  });
}
export const ferry = (...args: string[]) => run(bin, args);

export function file(name: string, text: string): string {
  const path = join(folder, name);
  writeFileSync(path, text);
  return path;
}
