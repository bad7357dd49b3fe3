/**
 * Applies the overlays of deploy/kubernetes to a cluster, each in a namespace of its own that is deleted afterwards:
 *
 *   node scripts/check-kubernetes.ts --context kind-kind           # every overlay
 *   node scripts/check-kubernetes.ts --context test --ready plain  # one, until its pods are ready
 *
 * The API server takes every object (strictly: no unknown field), in a dry run and then in earnest; a second look finds no
 * difference; the pods are admitted under the `restricted` standard; a changed image makes new pods. With --ready,
 * for a cluster whose nodes can have the images (or pretend to: kwok), also: the pods become ready, every Service has
 * addresses, every budget counts pods, and a rollout goes to its end.
 *
 * The context must be named: this writes to it. Kinds that the cluster does not know (KEDA, the Prometheus Operator, the
 * Gateway API) are left out, and said. About half a minute for each overlay. Exit 1 when one thing is not so.
 */
import { spawnSync } from "node:child_process";
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { parseAllDocuments } from "yaml";

const OVERLAYS = join(import.meta.dirname, "../deploy/kubernetes/overlays");
const WAIT_S = 120;

interface Manifest {
  readonly apiVersion: string;
  readonly kind: string;
  readonly metadata: { name: string; namespace?: string };
}

interface Ended {
  readonly status: number | null;
  readonly text: string;
}

/** As `kubectl get -o json` lists them, as far as it is read. */
interface Found {
  readonly metadata: { readonly name: string; readonly labels?: Readonly<Record<string, string>> };
  readonly endpoints?: readonly object[] | null;
  readonly status?: {
    readonly expectedPods?: number;
    readonly replicas?: number;
    readonly conditions?: readonly {
      readonly type: string;
      readonly status: string;
      readonly message?: string;
    }[];
  };
}

class Cluster {
  readonly #context: string;
  readonly namespace: string;
  failed = 0;

  constructor(context: string, namespace: string) {
    this.#context = context;
    this.namespace = namespace;
  }

  call(words: readonly string[], input?: string): Ended {
    const all = ["--context", this.#context, "--namespace", this.namespace, ...words];
    const { status, stdout, stderr, error } = spawnSync("kubectl", all, { input, encoding: "utf8" });
    if (error !== undefined) throw error;
    return { status, text: `${stdout}${stderr}`.trim() };
  }

  must(words: readonly string[], input?: string): string {
    const { status, text } = this.call(words, input);
    if (status !== 0) throw new Error(`kubectl ${words.join(" ")}: ${text}`);
    return text;
  }

  list(kind: string): readonly Found[] {
    return (JSON.parse(this.must(["get", kind, "--output", "json"])) as { readonly items: Found[] }).items;
  }

  check(what: string, kept: boolean, found = ""): void {
    if (!kept) this.failed += 1;
    const why = kept || found === "" ? "" : `: ${found.slice(0, 2000)}`;
    console.error(`${kept ? "✔" : "✖"} ${what}${why}`);
  }
}

/** The overlay as it would be applied, moved into the namespace of this check. */
function render(cluster: Cluster, overlay: string): Manifest[] {
  const text = cluster.must(["kustomize", join(OVERLAYS, overlay)]);
  const manifests = parseAllDocuments(text).map((document) => document.toJS() as Manifest);
  for (const { kind, metadata } of manifests) {
    if (kind === "Namespace") metadata.name = cluster.namespace;
    else metadata.namespace = cluster.namespace;
  }
  return manifests;
}

function known(cluster: Cluster, manifests: readonly Manifest[]): Manifest[] {
  const rows = cluster.must(["api-resources", "--no-headers"]).split("\n");
  // … APIVERSION NAMESPACED KIND
  const kinds = new Set(rows.map((row) => row.trim().split(/\s+/).slice(-3).toSpliced(1, 1).join(" ")));
  const left = manifests.filter(({ apiVersion, kind }) => !kinds.has(`${apiVersion} ${kind}`));
  const names = [...new Set(left.map(({ kind }) => kind))];
  if (names.length > 0) console.error(`  left out, the cluster does not know them: ${names.join(", ")}`);
  return manifests.filter((manifest) => !left.includes(manifest));
}

function apply(cluster: Cluster, manifests: readonly Manifest[]): string {
  const text = JSON.stringify({ apiVersion: "v1", kind: "List", items: manifests });
  const strict = ["apply", "--validate=strict", "--filename", "-"];
  cluster.must(strict, JSON.stringify(manifests.find(({ kind }) => kind === "Namespace")));
  const secret = ["--from-literal=admin-token=check", "--from-literal=redis-url=redis://redis.invalid:6379"];
  cluster.must(["create", "secret", "generic", "ferry", ...secret]);
  const dry = cluster.call([...strict, "--dry-run=server"], text);
  cluster.check(`${manifests.length} objects pass a strict dry run`, dry.status === 0, dry.text);
  const said = cluster.must(strict, text);
  cluster.check("they are applied, without a warning", !/warning/i.test(said), said);
  return text;
}

/** Every controller has made its pods: none was refused. */
function checkPods(cluster: Cluster, workloads: readonly string[]): void {
  for (const name of workloads) {
    const made = cluster.call(["wait", name, "--for=jsonpath={.status.replicas}", `--timeout=${WAIT_S}s`]);
    cluster.check(`${name}: its pods are admitted`, made.status === 0, `${made.text} ${refusals(cluster)}`);
  }
}

function refusals(cluster: Cluster): string {
  const said = cluster
    .list("replicasets")
    .flatMap(({ status }) => status?.conditions ?? [])
    .filter(({ type, status }) => type === "ReplicaFailure" && status === "True");
  return said.map(({ message }) => message).join("; ");
}

function checkReady(cluster: Cluster, workloads: readonly string[]): void {
  const limit = `--timeout=${WAIT_S}s`;
  const ready = (): boolean =>
    workloads.every((name) => cluster.call(["rollout", "status", name, limit]).status === 0);
  cluster.check("all are ready", ready());
  for (const { metadata, endpoints } of cluster.list("endpointslices.discovery.k8s.io"))
    cluster.check(`${metadata.name}: it has addresses`, (endpoints?.length ?? 0) > 0);
  for (const { metadata, status } of cluster.list("poddisruptionbudgets"))
    cluster.check(`the budget ${metadata.name} counts pods`, (status?.expectedPods ?? 0) > 0);
  const bare = cluster
    .list("pods")
    .filter(({ metadata }) => !metadata.labels?.["topology.kubernetes.io/zone"]);
  if (bare.length > 0)
    console.error("  pods have no zone: the cluster does not copy the label from its nodes");
}

function checkRollout(cluster: Cluster, ready: boolean): void {
  const before = cluster.list("replicasets").length;
  cluster.must([
    "set",
    "image",
    "deployment",
    "--selector",
    "app.kubernetes.io/name=ferry",
    "ferry=ferry:next",
  ]);
  for (const name of ["deployment/ferry-gateway", "deployment/ferry-batcher"]) {
    const now = cluster.must(["get", name, "--output", "jsonpath={.metadata.generation}"]);
    const seen = `--for=jsonpath={.status.observedGeneration}=${now}`;
    cluster.must(["wait", name, seen, `--timeout=${WAIT_S}s`]);
    if (!ready) continue;
    const done = cluster.call(["rollout", "status", name, `--timeout=${WAIT_S}s`]);
    cluster.check(`${name}: another image is rolled out to the end`, done.status === 0, done.text);
  }
  const after = cluster.list("replicasets").length;
  cluster.check("another image makes new pods", after > before, `${after} sets of pods, as before`);
}

/** How many things are not so. */
function checkOverlay(context: string, overlay: string, ready: boolean): number {
  const cluster = new Cluster(context, `ferry-check-${overlay}-${process.pid}`);
  console.error(`${overlay}, in ${cluster.namespace}`);
  try {
    const manifests = known(cluster, render(cluster, overlay));
    const text = apply(cluster, manifests);
    const workloads = manifests
      .filter(({ kind }) => kind === "Deployment" || kind === "StatefulSet")
      .map(({ kind, metadata }) => `${kind.toLowerCase()}/${metadata.name}`);
    checkPods(cluster, workloads);
    if (ready) checkReady(cluster, workloads);
    const differs = cluster.call(["diff", "--filename", "-"], text);
    cluster.check("the cluster has what was applied", differs.status === 0, differs.text);
    checkRollout(cluster, ready);
  } catch (error) {
    cluster.check("the rest was not tried", false, error instanceof Error ? error.message : String(error));
  } finally {
    cluster.call(["delete", "namespace", cluster.namespace, "--ignore-not-found", `--timeout=${WAIT_S}s`]);
  }
  return cluster.failed;
}

if (import.meta.main) {
  const { values, positionals } = parseArgs({
    options: { context: { type: "string" }, ready: { type: "boolean", default: false } },
    allowPositionals: true,
  });
  const { context } = values;
  if (context === undefined) {
    console.error("which cluster? --context NAME; `kubectl config get-contexts` lists them");
    process.exitCode = 2;
  } else {
    const overlays = positionals.length > 0 ? positionals : readdirSync(OVERLAYS).sort();
    const failed = overlays.map((overlay) => checkOverlay(context, overlay, values.ready));
    const sum = failed.reduce((all, each) => all + each, 0);
    console.error(sum === 0 ? "the cluster takes all of it" : `${sum} things are not so`);
    process.exitCode = sum === 0 ? 0 : 1;
  }
}
