/**
 * `npm run sbom`: what runs in production, as CycloneDX, from the lock file.
 *
 *   npm run sbom                   writes sbom.cdx.json
 *   npm run sbom -- other.json     or another file
 *
 * npm writes it, with everything in it, and this leaves out what is for development: with `--omit=dev` npm 11.19 also
 * forgets a package of ours that one of those would like to have beside it (undici, which is optional to openai). npm
 * calls what it describes by the name of the folder it stands in; here it gets its own.
 */
import { spawnSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

interface Component {
  readonly "bom-ref": string;
  readonly name: string;
  readonly version: string;
  readonly properties: readonly { readonly name: string; readonly value: string }[];
}

interface Bill {
  readonly metadata: { readonly component: Component };
  readonly components: readonly Component[];
  readonly dependencies: readonly { readonly ref: string; readonly dependsOn: readonly string[] }[];
}

const root = join(import.meta.dirname, "..");

export function bill(): Bill {
  const asked = ["--package-lock-only", "--sbom-format=cyclonedx", "--sbom-type=application"];
  const { status, stdout, stderr } = spawnSync("npm", ["sbom", ...asked], { cwd: root, encoding: "utf8" });
  if (status !== 0) throw new Error(`npm sbom failed: ${stderr}`);
  const { name } = JSON.parse(readFileSync(join(root, "package.json"), "utf8")) as { name: string };
  return production(JSON.parse(stdout) as Bill, name);
}

function production(all: Bill, name: string): Bill {
  const component = { ...all.metadata.component, name };
  const components = all.components.filter(
    ({ properties }) => !properties.some((each) => each.name === "cdx:npm:package:development"),
  );
  const kept = new Set([component, ...components].map((each) => each["bom-ref"]));
  const dependencies = all.dependencies
    .filter(({ ref }) => kept.has(ref))
    .map(({ ref, dependsOn }) => ({ ref, dependsOn: dependsOn.filter((each) => kept.has(each)) }));
  return { ...all, metadata: { ...all.metadata, component }, components, dependencies };
}

if (import.meta.main) {
  const file = process.argv[2] ?? "sbom.cdx.json";
  const made = bill();
  writeFileSync(file, `${JSON.stringify(made, null, 2)}\n`);
  const { name, version } = made.metadata.component;
  console.error(`sbom: ${name} ${version} and ${made.components.length} packages, in ${file}`);
}
