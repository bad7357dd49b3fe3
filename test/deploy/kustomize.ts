/**
 * Renders deploy/kubernetes as `kubectl kustomize` does, as far as it uses it: `render(folder)` gives the objects.
 *
 *   node test/deploy/kustomize.ts           compares every folder below with kubectl's own rendering
 *
 * The tests must not need kubectl, which Debian has only in a version from 2021. What is known here: resources,
 * components, configMapGenerator (files, `behavior: replace`), images, namespace and JSON patches with a target. Anything
 * else is an error, never ignored, so that this and kustomize cannot drift apart in silence.
 */
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { createHash } from "node:crypto";
import { readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { parse, parseAllDocuments } from "yaml";

export const KUBERNETES = join(import.meta.dirname, "../../deploy/kubernetes");
export const FOLDERS = ["base", "overlays/prometheus", "overlays/plain"];

export interface Thing {
  readonly apiVersion: string;
  readonly kind: string;
  readonly metadata: {
    name: string;
    namespace?: string;
    readonly labels?: Readonly<Record<string, string>>;
    readonly annotations?: Readonly<Record<string, string>>;
  };
  readonly data?: Readonly<Record<string, string>>;
  readonly spec: Tree;
}

/** Any part of a YAML file. */
export type Node = string | number | boolean | null | Node[] | Tree;
export interface Tree {
  [field: string]: Node | undefined;
}

interface Kustomization {
  readonly apiVersion: string;
  readonly kind: string;
  readonly namespace?: string;
  readonly resources?: readonly string[];
  readonly components?: readonly string[];
  readonly configMapGenerator?: readonly { name: string; behavior?: string; files: readonly string[] }[];
  readonly images?: readonly { name: string; newName?: string; newTag?: string }[];
  readonly patches?: readonly { target: { kind: string; name: string }; patch: string }[];
}

const KNOWN = {
  Kustomization: "apiVersion kind namespace resources components configMapGenerator images patches".split(
    " ",
  ),
  Component: "apiVersion kind resources images patches".split(" "),
};

/** The objects of a folder, named as they would be applied. */
export function render(folder: string): Thing[] {
  const things = gather(join(KUBERNETES, folder), []);
  const names = new Map<string, string>();
  for (const thing of things) {
    if (thing.kind !== "ConfigMap") continue;
    const name = `${thing.metadata.name}-${digest(thing)}`;
    names.set(thing.metadata.name, name);
    thing.metadata.name = name;
  }
  for (const thing of things) {
    for (const place of findAll(thing, "configMap")) {
      const { name } = place as { name: string };
      assert.ok(names.has(name), `nothing makes the ConfigMap ${name}`);
      (place as { name: string }).name = names.get(name)!;
    }
  }
  return things;
}

function gather(folder: string, things: Thing[]): Thing[] {
  const file = parse(readFileSync(join(folder, "kustomization.yaml"), "utf8")) as Kustomization;
  const known = KNOWN[file.kind as keyof typeof KNOWN];
  for (const field of Object.keys(file))
    assert.ok(known.includes(field), `${folder}: ${field} is not known here`);
  for (const resource of file.resources ?? []) {
    const path = join(folder, resource);
    if (statSync(path).isDirectory()) gather(path, things);
    else for (const each of parseAllDocuments(readFileSync(path, "utf8"))) things.push(each.toJS() as Thing);
  }
  for (const generator of file.configMapGenerator ?? []) generate(folder, generator, things);
  for (const component of file.components ?? []) gather(join(folder, component), things);
  for (const { target, patch } of file.patches ?? []) {
    const thing = things.find(({ kind, metadata }) => kind === target.kind && metadata.name === target.name);
    assert.ok(thing !== undefined, `${folder}: no ${target.kind} ${target.name} to patch`);
    for (const step of parse(patch) as Step[]) change(thing as unknown as Tree, step);
  }
  for (const thing of things) {
    for (const image of file.images ?? []) rename(thing, image);
    if (file.namespace !== undefined && thing.kind !== "Namespace") thing.metadata.namespace = file.namespace;
  }
  return things;
}

function generate(
  folder: string,
  { name, behavior = "create", files }: NonNullable<Kustomization["configMapGenerator"]>[number],
  things: Thing[],
): void {
  const data = Object.fromEntries(files.map((file) => [file, readFileSync(join(folder, file), "utf8")]));
  const at = things.findIndex(({ kind, metadata }) => kind === "ConfigMap" && metadata.name === name);
  assert.equal(behavior, at === -1 ? "create" : "replace", `${folder}: configMapGenerator ${name}`);
  const made = { apiVersion: "v1", kind: "ConfigMap", metadata: { name }, data } as unknown as Thing;
  if (at === -1) things.push(made);
  else things[at] = made;
}

interface Step {
  readonly op: "remove" | "replace";
  readonly path: string;
  readonly value?: Node;
}

function change(thing: Tree, { op, path, value }: Step): void {
  const fields = path.split("/").slice(1);
  const last = fields.pop()!;
  const place = fields.reduce<Tree>((tree, field) => tree[field] as Tree, thing);
  assert.ok(last in place, `${path} is not there to ${op}`);
  if (op === "remove") delete place[last];
  else {
    assert.equal(op, "replace");
    place[last] = value!;
  }
}

function rename(
  thing: Thing,
  { name, newName = name, newTag }: { name: string; newName?: string; newTag?: string },
) {
  for (const containers of findAll(thing, "containers")) {
    for (const container of containers as { image: string }[]) {
      const [image, tag] = container.image.split(":") as [string, string?];
      if (image === name) container.image = `${newName}:${newTag ?? tag}`;
    }
  }
}

/** The values of every field of that name, however deep. */
export function findAll(node: unknown, name: string): unknown[] {
  if (node === null || typeof node !== "object") return [];
  return Object.entries(node).flatMap(([field, value]) => [
    ...(field === name ? [value as unknown] : []),
    ...findAll(value, name),
  ]);
}

/** Kustomize puts a hash behind the name, too; another one, which no test looks at. */
function digest({ data }: Thing): string {
  return createHash("sha256").update(JSON.stringify(data)).digest("hex").slice(0, 10);
}

const HASHED = /\b(ferry-config)-[0-9a-z]{10}\b/g;
const byName = (things: Thing[]): Map<string, Thing> =>
  new Map(things.map((thing) => [`${thing.kind}/${thing.metadata.name}`, thing] as const));

if (import.meta.main) {
  for (const folder of FOLDERS) {
    const text = execFileSync("kubectl", ["kustomize", join(KUBERNETES, folder)], { encoding: "utf8" });
    const theirs = parseAllDocuments(text.replaceAll(HASHED, "$1")).map((each) => each.toJS() as Thing);
    const ours = JSON.parse(JSON.stringify(render(folder)).replaceAll(HASHED, "$1")) as Thing[];
    assert.deepEqual(byName(ours), byName(theirs), folder);
    console.log(`${folder}: ${theirs.length} objects, as kubectl renders them`);
  }
}
