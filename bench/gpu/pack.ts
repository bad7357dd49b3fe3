/**
 * Packs what a machine without Node and without a network needs to run bench/gpu: Node itself and the production
 * dependencies.
 *
 *   node bench/gpu/pack.ts FILE.tar.xz
 *
 * Some 30 MB. Take it and a checkout to the machine with the GPU and run `python3 bench/gpu/start.py FILE.tar.xz` there.
 */
import { spawnSync } from "node:child_process";
import { cpSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";

const root = join(import.meta.dirname, "../..");
const [file] = process.argv.slice(2);
if (file === undefined) {
  process.stderr.write("usage: node bench/gpu/pack.ts FILE.tar.xz\n");
  process.exit(2);
}

interface Lock {
  readonly packages: Readonly<Record<string, { readonly dev?: boolean; readonly optional?: boolean }>>;
}

const { packages } = JSON.parse(readFileSync(join(root, "package-lock.json"), "utf8")) as Lock;
const needed = Object.entries(packages).filter(
  ([path, { dev, optional }]) => path !== "" && !dev && !optional,
);
const folder = mkdtempSync(join(tmpdir(), "ferry-kit-"));
try {
  cpSync(process.execPath, join(folder, "node"));
  for (const [path] of needed) {
    cpSync(join(root, path), join(folder, path), { recursive: true, dereference: true });
  }
  const { status } = spawnSync("tar", ["-C", folder, "-cJf", resolve(file), "."], {
    stdio: "inherit",
    env: { ...process.env, XZ_OPT: "-3 -T0" },
  });
  if (status !== 0) throw new Error("tar failed: it needs xz");
  process.stdout.write(`${file}: Node ${process.version} and ${needed.length} packages\n`);
} finally {
  rmSync(folder, { recursive: true });
}
