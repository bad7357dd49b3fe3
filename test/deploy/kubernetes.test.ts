/**
 * deploy/kubernetes, rendered: that Kubernetes would take it as it is meant, and that it fits what Ferry is: its
 * paths, ports, settings, times and metrics. `node test/deploy/kustomize.ts` compares the rendering with kubectl's.
 */
import assert from "node:assert/strict";
import { globSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { describe, test } from "node:test";
import { parse, parseAllDocuments } from "yaml";
import { Folder, ROOT } from "../e2e/harness.ts";
import { loadConfig } from "../../src/app/config/load.ts";
import { MAX_POLL_MS } from "../../src/gateway/native.ts";
import type { Config } from "../../src/app/config/config.ts";
import { healthRoutes } from "../../src/gateway/admin.ts";
import { prometheusRule } from "../../scripts/generate-kubernetes.ts";
import { findAll, FOLDERS, KUBERNETES, render, type Thing } from "./kustomize.ts";
import { flaws, SHAPES } from "./shapes.ts";

interface Probe {
  readonly httpGet: { readonly path: string; readonly port: string };
  readonly periodSeconds: number;
  readonly timeoutSeconds: number;
  readonly failureThreshold: number;
}

interface Container {
  readonly image: string;
  readonly args?: readonly string[];
  readonly ports: readonly { readonly name: string; readonly containerPort: number }[];
  readonly env?: readonly { readonly name: string; readonly valueFrom: Record<string, unknown> }[];
  readonly startupProbe: Probe;
  readonly readinessProbe: Probe;
  readonly livenessProbe?: Probe;
  readonly lifecycle?: { readonly preStop: { readonly sleep: { readonly seconds: number } } };
  readonly resources: Readonly<Record<"requests" | "limits", Readonly<Record<string, string>>>>;
  readonly securityContext: unknown;
}

interface Workload {
  readonly replicas?: number;
  readonly selector: { readonly matchLabels: Labels };
  readonly template: {
    readonly metadata: { readonly labels: Labels };
    readonly spec: {
      readonly terminationGracePeriodSeconds: number;
      readonly securityContext: unknown;
      readonly topologySpreadConstraints?: readonly {
        readonly labelSelector: { readonly matchLabels: Labels };
      }[];
      readonly containers: readonly [Container];
    };
  };
}

type Labels = Readonly<Record<string, string>>;
const FERRYS = ["ferry-gateway", "ferry-batcher"];
const rendered = new Map(FOLDERS.map((folder) => [folder, render(folder)] as const));
const whole = rendered.get("overlays/prometheus")!;
const plain = rendered.get("overlays/plain")!;

const get = (things: readonly Thing[], kind: string, name: string): Thing =>
  things.find((thing) => thing.kind === kind && thing.metadata.name === name) ??
  assert.fail(`${kind} ${name}`);
const specOf = (things: readonly Thing[], kind: string, name: string): unknown =>
  get(things, kind, name).spec;
const workloads = (things: readonly Thing[]): (readonly [string, Workload])[] =>
  things
    .filter(({ kind }) => kind === "Deployment" || kind === "StatefulSet")
    .map((thing) => [thing.metadata.name, thing.spec as unknown as Workload] as const);
const fits = (selector: Labels, labels: Labels): boolean =>
  Object.entries(selector).every(([name, value]) => labels[name] === value);

/** The config as a pod reads it, with the environment that its Deployment gives it. */
async function configOf(things: readonly Thing[]): Promise<Config> {
  await using folder = await Folder.make();
  const { data } = things.find(({ kind }) => kind === "ConfigMap")!;
  const env = {
    FERRY_ADMIN_TOKEN: "a-token",
    REDIS_URL: "rediss://ferry:secret@redis.example.com:6379",
    ZONE: "",
  };
  const given = (specOf(things, "Deployment", "ferry-gateway") as Workload).template.spec.containers[0].env!;
  assert.deepEqual(given.map(({ name }) => name).sort(), Object.keys(env).sort());
  const loaded = loadConfig(await folder.write("ferry.yaml", data!["ferry.yaml"]!), env);
  assert.deepEqual([loaded.problems ?? [], loaded.warnings], [[], []]);
  return loaded.config!;
}

for (const [folder, things] of rendered) {
  describe(`deploy/kubernetes/${folder}`, () => {
    test("every field is one that Kubernetes knows, and has its type", () => {
      for (const { apiVersion, kind, ...rest } of things) {
        const shape = SHAPES[`${apiVersion} ${kind}`];
        assert.ok(shape !== undefined, `${apiVersion} ${kind} is not in the table`);
        assert.deepEqual(flaws(rest, shape, `${kind} ${rest.metadata.name}`), []);
      }
    });

    test("no object stands there twice, and all are in the namespace", () => {
      const names = things.map(({ kind, metadata }) => `${kind}/${metadata.name}`);
      assert.deepEqual(names, [...new Set(names)]);
      const namespace = folder === "base" ? undefined : "ferry";
      for (const { kind, metadata } of things)
        assert.equal(metadata.namespace, kind === "Namespace" ? undefined : namespace, metadata.name);
    });

    test("selectors find the pods that they are meant for, and all of one workload", () => {
      const pods = workloads(things).map(([name, { template }]) => [name, template.metadata.labels] as const);
      const selected = (selector: Labels): string[] =>
        pods.filter(([, labels]) => fits(selector, labels)).map(([name]) => name);
      for (const [name, { selector, template }] of workloads(things)) {
        assert.deepEqual(selected(selector.matchLabels), [name]);
        for (const { labelSelector } of template.spec.topologySpreadConstraints ?? [])
          assert.deepEqual(selected(labelSelector.matchLabels), [name]);
      }
      for (const { kind, metadata, spec } of things) {
        if (kind === "PodDisruptionBudget")
          assert.deepEqual(selected((spec as unknown as Workload).selector.matchLabels), [metadata.name]);
        if (kind === "NetworkPolicy") {
          const { matchLabels } = spec["podSelector"] as unknown as { matchLabels: Labels };
          const own = pods.some(([name]) => name === metadata.name) ? [metadata.name] : FERRYS;
          assert.deepEqual(selected(matchLabels).sort(), own.toSorted(), metadata.name);
        }
      }
      assert.deepEqual(selected((specOf(things, "Service", "ferry") as { selector: Labels }).selector), [
        "ferry-gateway",
      ]);
      const { selector } = specOf(things, "Service", "ferry-admin") as { selector: Labels };
      assert.deepEqual(selected(selector).sort(), FERRYS.toSorted());
    });

    test("whatever scales, scales something that is there and that nobody else counts", () => {
      for (const { kind, metadata, spec } of things) {
        if (kind !== "ScaledObject" && kind !== "HorizontalPodAutoscaler") continue;
        const { kind: of, name } = spec["scaleTargetRef"] as { kind: string; name: string };
        const target = get(things, of, name);
        assert.equal(target.spec["replicas"], undefined, `${metadata.name} and the ${of} both say how many`);
      }
    });

    test("images have a version, and nothing secret stands in any file", () => {
      for (const [name, { template }] of workloads(things)) {
        assert.match(template.spec.containers[0].image, /:\d+\.\d+\.\d+$/, name);
        for (const { name, valueFrom } of template.spec.containers[0].env ?? [])
          assert.ok("secretKeyRef" in valueFrom || "fieldRef" in valueFrom, name);
      }
      assert.ok(things.every(({ kind }) => kind !== "Secret"));
      assert.doesNotMatch(JSON.stringify(things), /:\/\/[^"$/]*:[^"$/]*@|"(token|password)":"[^$"]/);
      for (const each of findAll(things, "secretKeyRef"))
        assert.equal((each as { name: string }).name, "ferry");
    });

    test("the config is valid without a warning, and its ports are the containers'", async () => {
      const { listen, admin, zone } = await configOf(things);
      assert.equal(zone, "any", "no topology label: the downward API gives an empty variable");
      const ports = { http: listen.port, admin: admin.listen.port };
      for (const name of FERRYS) {
        const { args, ports: open } = (specOf(things, "Deployment", name) as Workload).template.spec
          .containers[0];
        assert.deepEqual(args, [
          "serve",
          "-c",
          "/etc/ferry/ferry.yaml",
          "--role",
          name.slice("ferry-".length),
        ]);
        const own = name === "ferry-gateway" ? ports : { admin: ports.admin };
        assert.deepEqual(Object.fromEntries(open.map((port) => [port.name, port.containerPort])), own);
      }
    });

    test("probes ask paths that are there, on the schedule that was settled", () => {
      const paths = Object.keys(
        healthRoutes(
          () => false,
          () => true,
        ),
      );
      const seconds = ({ periodSeconds, failureThreshold }: Probe) => [periodSeconds, failureThreshold];
      for (const name of FERRYS) {
        const [container] = (specOf(things, "Deployment", name) as Workload).template.spec.containers;
        const { startupProbe, readinessProbe, livenessProbe } = container;
        for (const probe of [startupProbe, readinessProbe, livenessProbe!]) {
          assert.ok(paths.includes(probe.httpGet.path));
          assert.equal(probe.httpGet.port, "admin");
          assert.equal(probe.timeoutSeconds, 2);
        }
        assert.equal(livenessProbe!.httpGet.path, "/healthz");
        assert.equal(readinessProbe.httpGet.path, "/readyz");
        assert.deepEqual([startupProbe, readinessProbe, livenessProbe!].map(seconds), [
          [1, 60],
          [2, 2],
          [10, 3],
        ]);
      }
    });

    test("a pod has the time to drain, and a request that is held the time to end", async () => {
      const { limits, models } = await configOf(things);
      const held = Math.max(...models.map(({ timeouts }) => timeouts.totalMs));
      assert.ok(limits.drainMs > held);
      for (const name of FERRYS) {
        const { template } = specOf(things, "Deployment", name) as Workload;
        const graceMs = template.spec.terminationGracePeriodSeconds * 1000;
        const waitMs = (template.spec.containers[0].lifecycle?.preStop.sleep.seconds ?? 0) * 1000;
        assert.ok(graceMs >= waitMs + limits.drainMs + 5000, `${name}: ${graceMs} ms`);
        if (name === "ferry-gateway") assert.equal(waitMs, 5000);
      }
    });

    test("pods keep the restricted standard and have no CPU limit", () => {
      for (const [name, { template }] of workloads(things)) {
        const [container] = template.spec.containers;
        assert.partialDeepStrictEqual(
          template.spec.securityContext,
          { runAsNonRoot: true, runAsUser: 10001, seccompProfile: { type: "RuntimeDefault" } },
          name,
        );
        assert.deepEqual(container.securityContext, {
          allowPrivilegeEscalation: false,
          readOnlyRootFilesystem: true,
          capabilities: { drop: ["ALL"] },
        });
        const { requests, limits } = container.resources;
        assert.equal(limits["cpu"], undefined, name);
        assert.equal(limits["memory"], requests["memory"], name);
        if (FERRYS.includes(name)) assert.equal(requests["cpu"], "1");
      }
    });
  });
}

describe("deploy/kubernetes", () => {
  test("gateways: two at least, 70 % of their CPU, one away at a time, spread over zones", () => {
    assert.partialDeepStrictEqual(get(whole, "HorizontalPodAutoscaler", "ferry-gateway").spec, {
      minReplicas: 2,
      metrics: [{ resource: { name: "cpu", target: { averageUtilization: 70 } } }],
    });
    for (const name of FERRYS) {
      assert.equal(get(whole, "PodDisruptionBudget", name).spec["maxUnavailable"], 1);
      const { template } = specOf(whole, "Deployment", name) as Workload;
      assert.partialDeepStrictEqual(template.spec.topologySpreadConstraints, [
        { topologyKey: "topology.kubernetes.io/zone" },
      ]);
    }
  });

  test("the admin port is open to monitoring alone, and with metrics-api to KEDA", () => {
    const whoMay = (things: readonly Thing[]): unknown[] =>
      things
        .filter(({ kind }) => kind === "NetworkPolicy")
        .flatMap(
          ({ spec }) =>
            (spec["ingress"] ?? []) as unknown as { from?: unknown; ports: { port: unknown }[] }[],
        )
        .filter(({ ports }) => ports.some(({ port }) => port === "admin" || port === 8081))
        .flatMap(({ from }) => findAll(from, "kubernetes.io/metadata.name"));
    assert.deepEqual(whoMay(whole), ["monitoring"]);
    assert.deepEqual(whoMay(plain), ["monitoring", "keda"]);
  });

  test("batchers may reach Redis, DNS and the workers' port, gateways not the workers", async () => {
    const ports = (name: string): unknown[] =>
      findAll(get(whole, "NetworkPolicy", name).spec["egress"], "port");
    assert.deepEqual(ports("ferry"), [53, 53, 6379]);
    const { models } = await configOf(whole);
    const { backend, scaling } = models[0]!;
    assert.deepEqual(ports("ferry-batcher"), [9000]);
    const { maxReplicaCount } = specOf(whole, "ScaledObject", "embed") as { maxReplicaCount: number };
    assert.ok(maxReplicaCount <= scaling.max, "Ferry may want as many as there may be");
    const service = get(whole, "StatefulSet", "embed").spec["serviceName"] as string;
    assert.deepEqual(backend.workers, [`dns://${service}:9000/infer`], "the config names the Service");
    assert.equal(get(whole, "Service", service).spec["clusterIP"], "None", "each pod has its own address");
  });

  test("KEDA asks for metrics and paths that are there, and takes silence for an error", () => {
    const metrics = readFileSync(join(ROOT, "docs/metrics.md"), "utf8");
    const triggers = [...whole, ...plain]
      .filter(({ kind }) => kind === "ScaledObject")
      .flatMap(({ spec }) => spec["triggers"] as unknown as { type: string; metadata: Labels }[]);
    assert.deepEqual(triggers.map(({ type }) => type).sort(), ["metrics-api", "prometheus", "prometheus"]);
    for (const { type, metadata } of triggers) {
      if (type === "prometheus") {
        const [name] = /\bferry_\w+/.exec(metadata["query"]!)!;
        assert.match(metrics, new RegExp(`^\\| \`${name}\\{`, "m"));
        assert.match(metadata["query"]!, /job="ferry"/);
        assert.equal(metadata["ignoreNullValues"], "false");
      } else {
        const url = new URL(metadata["url"]!);
        assert.equal(url.host, "ferry-admin.ferry.svc:8081");
        assert.equal(url.pathname, "/internal/scaling");
        assert.equal(metadata["valueLocation"], "models.0.desired");
      }
    }
    for (const { spec } of [...whole, ...plain].filter(({ kind }) => kind === "ScaledObject"))
      assert.partialDeepStrictEqual(spec, { pollingInterval: 5, cooldownPeriod: 300 });
  });

  test("Prometheus scrapes every process as one job, with the token, and has the rules of deploy/prometheus", () => {
    const monitor = specOf(whole, "ServiceMonitor", "ferry") as {
      jobLabel: string;
      selector: { matchLabels: Labels };
      endpoints: { port: string }[];
    };
    const services = whole.filter(
      ({ kind, metadata }) => kind === "Service" && fits(monitor.selector.matchLabels, metadata.labels ?? {}),
    );
    assert.deepEqual(
      services.map(({ metadata }) => metadata.name),
      ["ferry-admin"],
    );
    assert.equal(services[0]!.metadata.labels![monitor.jobLabel], "ferry");
    assert.equal(monitor.endpoints[0]!.port, "admin");
    const rule = readFileSync(join(KUBERNETES, "components/monitoring/prometheus-rule.yaml"), "utf8");
    assert.equal(rule, prometheusRule(), "run node scripts/generate-kubernetes.ts");
    const rules = parse(readFileSync(join(ROOT, "deploy/prometheus/ferry.rules.yaml"), "utf8")) as object;
    assert.deepEqual(get(whole, "PrometheusRule", "ferry").spec, rules);
  });

  test("what routes to Ferry names a port of its Service, and waits longer than a request may be held", async () => {
    const { ports } = specOf(whole, "Service", "ferry") as { ports: { name: string; port: number }[] };
    const { models } = await configOf(whole);
    const heldS = Math.max(MAX_POLL_MS, ...models.map(({ timeouts }) => timeouts.totalMs)) / 1000;
    const [backend] = findAll(get(whole, "Ingress", "ferry"), "service") as { port: { name: string } }[];
    assert.equal(backend!.port.name, ports[0]!.name);
    const { annotations } = get(whole, "Ingress", "ferry").metadata;
    assert.ok(Number(annotations!["nginx.ingress.kubernetes.io/proxy-read-timeout"]) > heldS);
    const [refs] = findAll(get(plain, "HTTPRoute", "ferry"), "backendRefs") as {
      name: string;
      port: number;
    }[][];
    assert.deepEqual(refs, [{ name: "ferry", port: ports[0]!.port }]);
    const [waits] = findAll(get(plain, "HTTPRoute", "ferry"), "request") as string[];
    assert.ok(Number.parseInt(waits!) > heldS);
  });

  test("every file is part of some rendering", () => {
    const used = FOLDERS.concat(globSync("components/*", { cwd: KUBERNETES }));
    const filesOf = (folder: string): string[] => {
      const file = parse(readFileSync(join(KUBERNETES, folder, "kustomization.yaml"), "utf8")) as {
        resources?: string[];
        configMapGenerator?: { files: string[] }[];
      };
      const configs = (file.configMapGenerator ?? []).flatMap(({ files }) => files);
      return ["kustomization.yaml", ...(file.resources ?? []), ...configs].map((name) => join(folder, name));
    };
    const named = new Set(used.flatMap(filesOf));
    const files = globSync("**/*.yaml", { cwd: KUBERNETES });
    assert.deepEqual(
      files.filter((file) => !named.has(file)),
      [],
    );
  });
});

test("the files of docs/autoscale-keda.md fit together, and the fleet's rules let them in", () => {
  const page = readFileSync(join(ROOT, "docs/autoscale-keda.md"), "utf8");
  assert.ok(page.split("\n").length <= 121);
  const [pods, config, scale] = [...page.matchAll(/```yaml\n(# \w.*?)```/gs)].map(([, text]) =>
    parseAllDocuments(text!).map((each) => each.toJS() as Thing),
  );
  const { template, serviceName } = pods![0]!.spec as unknown as Workload & { serviceName: string };
  const [reach] = findAll(get(whole, "NetworkPolicy", "ferry-batcher").spec, "to") as [
    { podSelector: Workload["selector"] }[],
  ];
  assert.ok(fits(reach[0]!.podSelector.matchLabels, template.metadata.labels));
  assert.equal(pods![1]!.metadata.name, serviceName);
  const { apiVersion, kind, ...scaled } = scale![0]!;
  assert.deepEqual(flaws(scaled, SHAPES[`${apiVersion} ${kind}`]!), []);
  assert.deepEqual(findAll(config, "workers"), [`dns://${serviceName}:9000/infer`]);
  const valid = { runAsNonRoot: true, seccompProfile: { type: "RuntimeDefault" } };
  assert.partialDeepStrictEqual(template.spec.securityContext, valid);
});

test("a field that is not there, missing or of another type is found", () => {
  const things = structuredClone(render("base"));
  const broken = get(things, "Deployment", "ferry-gateway").spec as unknown as {
    replicaz: number;
    revisionHistoryLimit?: number;
    template: { spec: { containers: [{ image: unknown }] } };
  };
  broken.replicaz = 2;
  delete broken.revisionHistoryLimit;
  broken.template.spec.containers[0].image = 7;
  assert.deepEqual(flaws(broken, (SHAPES["apps/v1 Deployment"] as { spec: never }).spec, "spec"), [
    "spec.template.spec.containers[0].image: is no string",
    "spec.replicaz: no such field",
    "spec.revisionHistoryLimit: is missing",
  ]);
});
