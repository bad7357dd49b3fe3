/** Item 37, what of it can be checked without a network; and where the remaining items are tested. */
import assert from "node:assert/strict";
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { describe, test } from "node:test";
import { bill } from "../../scripts/sbom.ts";
import { ROOT } from "../e2e/harness.ts";

interface Locked {
  readonly version?: string;
  readonly resolved?: string;
  readonly integrity?: string;
  readonly dev?: boolean;
  readonly optional?: boolean;
  readonly link?: boolean;
  readonly hasInstallScript?: boolean;
}
interface Lock {
  readonly lockfileVersion: number;
  readonly packages: Readonly<Record<string, Locked>>;
}
interface Manifest {
  readonly dependencies: Readonly<Record<string, string>>;
  readonly devDependencies: Readonly<Record<string, string>>;
  readonly scripts: Readonly<Record<string, string>>;
  readonly allowScripts: Readonly<Record<string, boolean>>;
}
const read = (name: string): unknown => JSON.parse(readFileSync(join(ROOT, name), "utf8"));
const lock = read("package-lock.json") as Lock;
const manifest = read("package.json") as Manifest;
const packages = Object.entries(lock.packages).filter(([path]) => path !== "");
const production = packages.filter(([, { dev }]) => dev !== true);

describe("37 supply chain: what can be checked offline", () => {
  test("37 every package in the lock file has a SHA-512", () => {
    for (const [path, { integrity }] of packages)
      assert.match(integrity ?? "", /^sha512-[\w+/]{86}==$/, path);
  });
  test("37 no package comes from git, a file, a link or plain HTTP", () => {
    for (const [path, { resolved = "", link }] of packages) {
      assert.ok(link !== true, path);
      assert.match(resolved, /^$|^https:\/\/[^/]+\/.+\.tgz$/, path);
    }
    for (const version of Object.values({ ...manifest.dependencies, ...manifest.devDependencies }))
      assert.match(version, /^\d+\.\d+\.\d+$/, "versions are exact");
  });
  test("37 all packages come from one host", () => {
    const hosts = new Set(packages.flatMap(([, { resolved }]) => (resolved ? [new URL(resolved).host] : [])));
    assert.ok(hosts.size <= 1, [...hosts].join(", "));
  });
  test("37 at most 45 packages run in production, those of others included", () => {
    assert.ok(production.length <= 45, production.map(([path]) => path).join(", "));
    for (const name of Object.keys(manifest.dependencies))
      assert.ok(
        production.some(([path]) => path === `node_modules/${name}`),
        name,
      );
  });
  test("37 none of them has an install script; in development only the pinned Node may run one", () => {
    for (const [path, { hasInstallScript }] of production) assert.ok(hasInstallScript !== true, path);
    assert.deepEqual(manifest.allowScripts, { node: true });
    for (const name of ["preinstall", "install", "postinstall", "prepare"])
      assert.equal(manifest.scripts[name], undefined, name);
  });
  test("37 the bill of materials (npm run sbom) names exactly the packages that run in production", () => {
    const named = bill().components.map(({ name, version }) => `${name}@${version}`);
    const locked = production.map(
      ([path, { version }]) => `${path.split("node_modules/").at(-1)}@${version}`,
    );
    assert.deepEqual([...new Set(named)].sort(), [...new Set(locked)].sort());
  });
  test("37 signatures, release cooldown and provenance: of the publishing pipeline, not of this tree", () => {});
});

/** Item → the file that tests it; the file must be there. */
const ELSEWHERE: Readonly<Record<string, string>> = {
  "15 mass assignment without credentials: the fields tier, priority and others are 400":
    "test/e2e/limits.test.ts",
  "31 cardinality: whatever clients send makes no new series of metrics": "test/e2e/metrics.test.ts",
  "35 Redis ACL: Ferry's user may do what the scripts need and nothing else": "test/e2e/redis-acl.test.ts",
  "36 crossing: no caller gets another's answer under load and faults": "test/e2e/crossing.test.ts",
};
describe("items that are tested in other files", () => {
  for (const [item, file] of Object.entries(ELSEWHERE)) {
    test(`${item} (${file})`, () => assert.ok(existsSync(join(ROOT, file))));
  }
  test("33 mTLS to workers, wrong CA, name or version: test/workers/backend/tls.test.ts and test/gateway/tls.test.ts", () => {});
});
