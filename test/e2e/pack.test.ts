/**
 * What is released: `npm pack` of a fresh copy of the checkout, installed into an empty project, and run from there.
 *
 * In the package there are no sources: Node strips no types below node_modules, so whatever is found at run time by its
 * name (threads, scripts, the page, the Python file) must have been built or copied, and is used here once. Packages come
 * from npm's cache as far as it has them, else from the registry.
 */
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { cpSync, existsSync, globSync, mkdirSync, readFileSync, statSync, symlinkSync } from "node:fs";
import { delimiter, dirname, join, relative } from "node:path";
import { after, before, describe, test } from "node:test";
import { bill } from "../../scripts/sbom.ts";
import { startServer } from "../engine/redis-client/servers.ts";
import { Ferry, Folder, ROOT } from "./harness.ts";

const MAX_PACKED_BYTES = 850_000;
const NOT_COPIED = new Set(["node_modules", ".git", "dist", "ferry-data"]);
/** Everything that a package may hold. */
const EXPECTED =
  /^(dist\/.+\.(js|py|lua|html|css|svg)|docs\/[\w-]+\.md|bin\/ferry|(README|CHANGELOG)\.md|LICENSE|package\.json|ferry\.example\.yaml)$/;

const DEMO = { name: "demo", backend: { kind: "simulated", workers: 2, baseMs: 5 } };

const manifest = JSON.parse(readFileSync(join(ROOT, "package.json"), "utf8")) as {
  readonly version: string;
  readonly dependencies: Readonly<Record<string, string>>;
};
// The Node that runs the tests is the one that runs the package.
process.env["PATH"] = [dirname(process.execPath), process.env["PATH"]].join(delimiter);

function run(command: string, words: readonly string[], cwd: string): string {
  const { status, stdout, stderr, error } = spawnSync(command, words, {
    cwd,
    encoding: "utf8",
    timeout: 120_000,
  });
  const said = `${stdout}\n${stderr}\n${error?.message ?? ""}`;
  assert.equal(status, 0, `${command} ${words.join(" ")}\n${said}`);
  return stdout;
}

describe("the package", () => {
  let folder: Folder;
  let project: string;
  let installed: string;
  let program: string;
  let packedBytes: number;

  before(async () => {
    folder = await Folder.make();
    const copy = join(folder.path, "checkout");
    cpSync(ROOT, copy, {
      recursive: true,
      filter: (path) => !NOT_COPIED.has(relative(ROOT, path).split("/")[0]!),
    });
    symlinkSync(join(ROOT, "node_modules"), join(copy, "node_modules"));
    run("npm", ["pack", "--prefix", copy, "--pack-destination", folder.path], copy);
    const tarball = join(folder.path, `ferry-${manifest.version}.tgz`);
    packedBytes = statSync(tarball).size;
    project = join(folder.path, "project");
    mkdirSync(project);
    const rules = ["--omit=dev", "--prefer-offline", "--no-audit", "--no-fund"];
    run("npm", ["install", "--prefix", project, ...rules, tarball], project);
    installed = join(project, "node_modules/ferry");
    program = join(project, "node_modules/.bin/ferry");
  });

  after(() => folder?.[Symbol.asyncDispose]());

  test("holds what runs and its manual, and nothing else: no sources, tests, benchmarks or source maps", (t) => {
    const files = globSync("**/*", { cwd: installed, exclude: ["node_modules"] }).filter((file) =>
      statSync(join(installed, file)).isFile(),
    );
    assert.deepEqual(
      files.filter((file) => !EXPECTED.test(file)),
      [],
    );
    for (const file of files.filter((name) => name.endsWith(".js")))
      assert.doesNotMatch(readFileSync(join(installed, file), "utf8"), /^\/\/# sourceMappingURL/m, file);
    assert.ok(packedBytes < MAX_PACKED_BYTES, `${packedBytes} bytes`);
    t.diagnostic(`${files.length} files, ${Math.round(packedBytes / 1000)} KB packed`);
  });

  test("holds every source, built, and every other file beside them, as it is", () => {
    const sources = globSync("src/**/*", { cwd: ROOT }).filter((file) => statSync(join(ROOT, file)).isFile());
    for (const file of sources) {
      const built = join(installed, file.replace(/^src/, "dist").replace(/\.ts$/, ".js"));
      assert.ok(existsSync(built), built);
      if (!file.endsWith(".ts")) assert.deepEqual(readFileSync(built), readFileSync(join(ROOT, file)), file);
    }
  });

  test("brings along what its bill names, ours at their exact versions, and at most 45 packages", () => {
    const there = globSync(["*/package.json", "@*/*/package.json", "**/node_modules/*/package.json"], {
      cwd: join(project, "node_modules"),
    }).map((file) => dirname(file).split("node_modules/").at(-1)!);
    // Versions of what others bring along may move between the lock file and today.
    for (const { name } of bill().components) assert.ok(there.includes(name), name);
    assert.ok(there.length <= 45 + 1, there.join(", "));
    for (const [name, version] of Object.entries(manifest.dependencies)) {
      const found = readFileSync(join(project, "node_modules", name, "package.json"), "utf8");
      assert.equal((JSON.parse(found) as { version: string }).version, version, name);
    }
  });

  test("npx ferry says its version, and checks a config", () => {
    const ferry = (...words: string[]): string => run("npx", ["--no", "--", "ferry", ...words], project);
    assert.equal(ferry("--version").trim(), `ferry ${manifest.version}`);
    assert.match(ferry("check", "-c", join(installed, "ferry.example.yaml")), /is valid/);
  });

  test("ferry serve answers: simulated, Python, a module, the journal, the dashboard", async () => {
    const python = await folder.write(
      "model.py",
      "def up(inputs):\n    return [text.upper() for text in inputs]\n",
    );
    const module = await folder.write(
      "model.ts",
      "export default (inputs: string[]): string[] => inputs.map((text) => text + '!');\n",
    );
    const models = [
      DEMO,
      { name: "python", backend: { kind: "python", function: `${python}:up`, workers: 1 } },
      { name: "module", backend: { kind: "module", function: module, workers: 1 } },
    ];
    await using ferry = await Ferry.start({ engine: { dataDir: "data" }, models }, folder, program);
    assert.equal(await ferry.infer("hello", { model: "demo" }), "hello");
    assert.equal(await ferry.infer("hello", { model: "python" }), "HELLO");
    assert.equal(await ferry.infer("hello", { model: "module" }), "hello!");
    for (const path of ["/", "/assets/app.js", "/assets/uplot.js", "/metrics"])
      assert.equal((await ferry.admin(path)).status, 200, path);
    assert.equal((await ferry.stop()).code, 0);
  });

  test("ferry serve answers on Redis", async () => {
    await using redis = await startServer();
    const engine = { kind: "redis", url: redis.url, durability: "local" };
    await using ferry = await Ferry.start({ engine, models: [DEMO] }, folder, program);
    assert.equal(await ferry.infer("hello"), "hello");
  });
});
