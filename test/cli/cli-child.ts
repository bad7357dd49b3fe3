/** The command line: `ferry(…)` calls it in this process, `run(bin, …)` starts the real bin/ferry. */
import { execFile } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after } from "node:test";
import { fileURLToPath } from "node:url";
import { main } from "../../src/cli.ts";

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

/** What bin/ferry would say to these arguments, without a process of 0.3 s of CPU. */
export const ferry = (...args: string[]) => ferryIn(folder, args);

/** Calls of one test at a time may be under way together only from one folder. */
export async function ferryIn(cwd: string, args: readonly string[]): Promise<Ended> {
  let [out, err] = ["", ""];
  process.chdir(cwd);
  const console = {
    out: (text: string) => void (out += text),
    err: (text: string) => void (err += text),
    env: process.env,
    outIsTTY: false,
    errIsTTY: false,
  };
  const code = await main(args, console);
  return { code, out, err };
}

export function file(name: string, text: string): string {
  const path = join(folder, name);
  writeFileSync(path, text);
  return path;
}
