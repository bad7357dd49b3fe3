/**
 * Packs what a machine without Node and without a network needs to run the benchmarks in a checkout: Node itself, the
 * production dependencies and, with --redis, redis-server and redis-cli.
 *
 *   node bench/kit/pack.ts [--redis] FILE.tar.xz
 *
 * Some 40 MB. Take it and a checkout to the other machine and run `python3 bench/kit/start.py FILE.tar.xz COMMAND` there.
 *
 * The archive is a node_modules folder as `npm ci --omit=dev` leaves it, with the programs in .bin. Redis comes with its
 * shared libraries, its C library and the loader of that: it runs whatever distribution it was built for.
 */
import { spawnSync } from "node:child_process";
import {
  chmodSync,
  copyFileSync,
  cpSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { basename, join, resolve } from "node:path";
import { parseArgs } from "node:util";

const root = join(import.meta.dirname, "../..");
const { values, positionals } = parseArgs({
  options: { redis: { type: "boolean", default: false } },
  allowPositionals: true,
});
const [file] = positionals;
if (file === undefined) {
  process.stderr.write("usage: node bench/kit/pack.ts [--redis] FILE.tar.xz\n");
  process.exit(2);
}

const folder = mkdtempSync(join(tmpdir(), "ferry-kit-"));
try {
  const packages = copyPackages();
  copyNode();
  const redis = values.redis ? copyRedis() : "";
  run("tar", ["-C", folder, "-cJf", resolve(file), "node_modules"], { XZ_OPT: "-6 -T0" });
  process.stdout.write(`${file}: Node ${process.version}, ${packages} packages${redis}\n`);
} finally {
  rmSync(folder, { recursive: true });
}

/** Returns how many. */
function copyPackages(): number {
  interface Lock {
    readonly packages: Readonly<Record<string, { readonly dev?: boolean; readonly optional?: boolean }>>;
  }
  const { packages } = JSON.parse(readFileSync(join(root, "package-lock.json"), "utf8")) as Lock;
  const needed = Object.entries(packages).filter(
    ([path, { dev, optional }]) => path !== "" && !dev && !optional,
  );
  for (const [path] of needed) {
    cpSync(join(root, path), join(folder, path), { recursive: true, dereference: true });
  }
  return needed.length;
}

function copyNode(): void {
  cpSync(process.execPath, join(folder, "node_modules/node/bin/node"));
  mkdirSync(join(folder, "node_modules/.bin"));
  symlinkSync("../node/bin/node", join(folder, "node_modules/.bin/node"));
}

/** Returns what to say of it. */
function copyRedis(): string {
  const place = join(folder, "node_modules/.redis");
  mkdirSync(place);
  for (const program of ["redis-server", "redis-cli"]) {
    const path = run("sh", ["-c", `command -v ${program}`]).trim();
    copyFileSync(path, join(place, program));
    // "libm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x…)", and the loader alone: "/lib64/ld-linux-x86-64.so.2 (0x…)".
    const libraries = [...run("ldd", [path]).matchAll(/(\/\S+) \(0x/g)].map(([, library]) => library!);
    for (const library of libraries) copyFileSync(library, join(place, basename(library)));
    const loader = libraries.map((library) => basename(library)).find((name) => name.startsWith("ld-"));
    if (loader === undefined) throw new Error(`ldd ${path}: no loader among ${libraries.join(", ")}`);
    const wrapper = join(folder, "node_modules/.bin", program);
    writeFileSync(
      wrapper,
      `#!/bin/sh\nplace=\${0%/*}/../.redis\nexec "$place/${loader}" --library-path "$place" "$place/${program}" "$@"\n`,
    );
    chmodSync(wrapper, 0o755);
  }
  return `, ${run("redis-server", ["--version"]).split(" sha=", 1)[0]}`;
}

function run(command: string, args: readonly string[], env: Readonly<Record<string, string>> = {}): string {
  const { status, stdout, stderr, error } = spawnSync(command, args, {
    encoding: "utf8",
    env: { ...process.env, ...env },
  });
  if (status !== 0) throw new Error(`${command} ${args.join(" ")}: ${error?.message ?? stderr}`);
  return stdout;
}
