/**
 * compose.yaml, the Dockerfile and the unit for systemd, as far as they can be held to without Docker and systemd: what
 * they name is there, versions are pinned, nobody is root, nothing is secret; and the steps of the Dockerfile, run by hand
 * in a folder, give a Ferry that works. test/e2e/edge.test.ts runs the config and the workers of deploy/compose;
 * scripts/check-image.ts builds and runs the image itself, where there is a Docker or a Podman.
 */
import assert from "node:assert/strict";
import { execFileSync, spawnSync } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { chmod, cp, link, mkdir, symlink } from "node:fs/promises";
import { join } from "node:path";
import { describe, test } from "node:test";
import { parse } from "yaml";
import { Folder, ROOT } from "../e2e/harness.ts";
import { loadConfig } from "../../src/app/config/load.ts";
import { MAX_POLL_MS } from "../../src/gateway/native.ts";
import { promtool } from "./promtool.ts";

const read = (file: string): string => readFileSync(join(ROOT, file), "utf8");
const UID = 10_001;

interface Service {
  readonly image: string;
  readonly build?: string;
  readonly command?: readonly string[];
  readonly environment?: Readonly<Record<string, string>>;
  readonly volumes?: readonly string[];
  readonly ports?: readonly string[];
  readonly deploy?: { readonly replicas: number };
  readonly depends_on?: Readonly<Record<string, { readonly condition: string }>>;
  readonly healthcheck?: { readonly test: readonly unknown[] };
  readonly secrets?: readonly string[];
  readonly read_only?: boolean;
  readonly stop_grace_period?: string;
}

interface Compose {
  readonly services: Readonly<Record<string, Service>>;
  readonly volumes: object;
  readonly secrets: Readonly<Record<string, { readonly environment: string }>>;
}

const compose = parse(read("compose.yaml"), { merge: true }) as Compose;
const { services } = compose;
const each = Object.entries(services);
const config = loadConfig(join(ROOT, "deploy/compose/ferry.yaml"), { FERRY_ADMIN_TOKEN: "a-token" });
const node = (JSON.parse(read("package.json")) as { devDependencies: { node: string } }).devDependencies.node;

describe("compose.yaml", () => {
  test("has two of each, and whatever one looks at them with", () => {
    assert.deepEqual(Object.keys(services).sort(), [
      "batcher",
      "edge",
      "gateway",
      "grafana",
      "jaeger",
      "prometheus",
      "redis",
      "worker-1",
      "worker-2",
    ]);
    for (const role of ["gateway", "batcher"]) {
      const { command, deploy } = services[role]!;
      assert.deepEqual(command, ["serve", "-c", "/etc/ferry/ferry.yaml", "--role", role]);
      assert.equal(deploy?.replicas, 2);
    }
    assert.match(services["redis"]!.command!.join(" "), /--appendonly yes .*--maxmemory-policy noeviction/);
  });

  test("images have versions, ports are this machine's alone, and what is mounted is there", () => {
    for (const [name, { image, ports = [], volumes = [] }] of each) {
      assert.match(image, /:v?\d+\.\d+\.\d+(-[a-z-]+)?$/, name);
      for (const port of ports) assert.match(port, /^127\.0\.0\.1:/, name);
      for (const volume of volumes) {
        const [from] = volume.split(":") as [string];
        if (from.startsWith(".")) assert.match(volume, /:ro$/, name);
        assert.ok(from.startsWith(".") ? existsSync(join(ROOT, from)) : from in compose.volumes, volume);
      }
    }
    assert.equal(services["worker-1"]!.image, `node:${node}-bookworm-slim`);
  });

  test("everything in commands and checks is text, and whoever is waited for has a check", () => {
    for (const [name, { command = [], healthcheck, depends_on = {} }] of each) {
      for (const word of [...command, ...(healthcheck?.test ?? [])])
        assert.equal(typeof word, "string", name);
      for (const other of Object.keys(depends_on))
        assert.ok(services[other]?.healthcheck !== undefined, other);
    }
  });

  test("nothing secret stands in it", () => {
    assert.match(read("compose.yaml"), /FERRY_ADMIN_TOKEN: \$\{FERRY_ADMIN_TOKEN:\?/);
    assert.deepEqual(compose.secrets, { "ferry-admin-token": { environment: "FERRY_ADMIN_TOKEN" } });
    for (const [name, { environment = {} }] of each)
      for (const key of Object.keys(environment))
        if (/PASSWORD|TOKEN|SECRET|KEY/.test(key))
          assert.match(environment[key]!, /^\$\{/, `${name}: ${key}`);
  });

  test("its config is valid, and names services and ports that are there", () => {
    assert.deepEqual([config.problems ?? [], config.warnings], [[], []]);
    const { listen, admin, limits, models, telemetry } = config.config!;
    assert.deepEqual([listen.port, admin.listen.port], [8080, 8081]);
    const { workers } = models[0]!.backend as unknown as { workers: readonly string[] };
    const hosts = [...workers, telemetry.otlpUrl!].map((url) => new URL(url).hostname);
    for (const host of hosts) assert.ok(host in services, host);
    for (const worker of workers)
      assert.equal(new URL(worker).port, services["worker-1"]!.environment!["PORT"]);
    assert.ok(Number.parseInt(services["gateway"]!.stop_grace_period!) * 1000 > limits.drainMs);
  });

  test("promtool takes the scrape config, and Grafana finds its files", async () => {
    await using folder = await Folder.make();
    const token = await folder.write("token", "a-token");
    const text = read("deploy/compose/prometheus.yaml").replace("/run/secrets/ferry-admin-token", token);
    await folder.write("prometheus.yaml", text);
    await folder.write("ferry.rules.yaml", read("deploy/prometheus/ferry.rules.yaml"));
    const { status, text: said } = promtool(["check", "config", "prometheus.yaml"], folder.path);
    assert.equal(status, 0, said);
    const { providers } = parse(read("deploy/compose/grafana-dashboards.yaml")) as {
      providers: { options: { path: string } }[];
    };
    assert.ok(services["grafana"]!.volumes!.includes(`./deploy/grafana:${providers[0]!.options.path}:ro`));
    const { datasources } = parse(read("deploy/compose/grafana-datasource.yaml")) as {
      datasources: { url: string }[];
    };
    for (const { url } of datasources) assert.ok(new URL(url).hostname in services, url);
  });
});

/** The Dockerfile's lines, with continued ones as one. */
const steps = read("Dockerfile")
  .replaceAll(/\\\n\s*/g, "")
  .split("\n")
  .filter((line) => line !== "" && !line.startsWith("#"));

/** The folders that `npm ci --omit=dev` makes, by the lock file. */
function production(): string[] {
  const lock = JSON.parse(read("package-lock.json")) as { packages: Record<string, { dev?: boolean }> };
  return Object.entries(lock.packages)
    .filter(([path, { dev }]) => path !== "" && dev !== true)
    .map(([path]) => path);
}

const stages = steps.join("\n").split(/^FROM /m);

describe("Dockerfile", () => {
  test("is pinned to the Node of package.json, ends as a number that is not root, and takes its signals", () => {
    assert.equal(steps[0], `ARG NODE=node:${node}-bookworm-slim`);
    assert.deepEqual(
      stages.slice(1).map((stage) => stage.split("\n")[0]),
      ["${NODE} AS build", "${NODE} AS dependencies", "${NODE}"],
    );
    const last = stages.at(-1)!;
    assert.match(last, new RegExp(`^USER ${UID}:${UID}$`, "m"));
    for (const line of [
      "EXPOSE 8080 8081",
      "STOPSIGNAL SIGTERM",
      'ENTRYPOINT ["node", "/opt/ferry/dist/cli.js"]',
    ])
      assert.ok(steps.includes(line), line);
    const labels = "title description version revision source licenses documentation created".split(" ");
    for (const label of labels) assert.ok(last.includes(`org.opencontainers.image.${label}=`), label);
    assert.doesNotMatch(last, /npm|ADD |curl/, "what builds stays behind");
    assert.match(last, /^ENV .*\bNODE_DISABLE_COMPILE_CACHE=1$/m, "or it writes beside the data");
    const order = ["WORKDIR /etc/ferry", `USER ${UID}:${UID}`].map((line) => last.indexOf(line));
    assert.ok(order[0]! < order[1]!, "whoever runs does not own the config's folder");
  });

  test("copies only what .dockerignore lets through", () => {
    const [all, ...through] = read(".dockerignore").trim().split("\n").slice(1);
    assert.equal(all, "*");
    const copied = steps
      .filter((line) => line.startsWith("COPY ") && !line.includes("--from="))
      .flatMap((line) => line.split(" ").slice(1, -1));
    assert.deepEqual([...new Set(copied)].sort(), through.map((line) => line.slice(1)).sort());
    for (const file of copied) assert.ok(existsSync(join(ROOT, file)), file);
  });

  test("its steps give a Ferry that runs as another user and writes nowhere", async () => {
    for (const step of ["RUN npm ci", "RUN npm run build", "RUN npm ci --omit=dev"])
      assert.ok(steps.includes(step));
    await using folder = await Folder.make();
    const at = (...names: string[]): string => join(folder.path, ...names);
    for (const stage of ["build", "final"]) await mkdir(at(stage));
    const copy = (stage: string, files: readonly string[]): Promise<unknown> =>
      Promise.all(files.map((file) => cp(join(ROOT, file), at(stage, file), { recursive: true })));
    await Promise.all([
      copy("build", ["package.json", "tsconfig.json", "tsconfig.build.json", "src"]),
      copy("final", ["package.json", "LICENSE", "bin"]),
    ]);
    // What `npm ci` would install is here already, and with --omit=dev a part of it.
    await symlink(join(ROOT, "node_modules"), at("build/node_modules"));
    execFileSync("npm", ["run", "build"], { cwd: at("build"), stdio: ["ignore", "ignore", "pipe"] });
    await Promise.all(
      production().map((path) => cp(join(ROOT, path), at("final", path), { recursive: true })),
    );
    await cp(at("build/dist"), at("final/dist"), { recursive: true });
    await link(process.execPath, at("final/node")).catch(() => cp(process.execPath, at("final/node")));
    await chmod(folder.path, 0o755);
    const root = process.getuid?.() === 0;
    const who = root ? { uid: UID, gid: UID } : {};
    const run = (...words: string[]) =>
      spawnSync(at("final/node"), [at("final/dist/cli.js"), ...words], {
        ...who,
        cwd: "/",
        env: { HOME: at("final"), FERRY_ADMIN_TOKEN: "a-token", NODE_ENV: "production" },
        encoding: "utf8",
      });
    assert.ok(steps.includes("RUN ln --symbolic /opt/ferry/bin/ferry /usr/local/bin/ferry"));
    const named = spawnSync(at("final/bin/ferry"), ["--version"], {
      env: { PATH: `${at("final")}:${process.env["PATH"]}`, NODE_DISABLE_COMPILE_CACHE: "1" },
      encoding: "utf8",
    });
    assert.match(named.stdout, /^ferry \d+\.\d+\.\d+/, named.stderr);
    const version = run("--version");
    assert.match(version.stdout, /^ferry \d+\.\d+\.\d+/, version.stderr);
    const config = await folder.write("ferry.yaml", read("deploy/compose/ferry.yaml"));
    await chmod(config, 0o644);
    assert.equal(run("check", "-c", config).status, 0);
    if (root) assert.ok(!existsSync(at("final/.cache")), "nothing was written");
  });
});

describe("deploy/systemd/ferry.service", () => {
  const unit = read("deploy/systemd/ferry.service");
  const value = (name: string): string => new RegExp(`^${name}=(.*)$`, "m").exec(unit)?.[1] ?? "";

  test("checks before it starts, gives up its rights, and leaves the time to drain", () => {
    const settled = {
      Type: "exec",
      Restart: "on-failure",
      LimitNOFILE: "1048576",
      DynamicUser: "yes",
      StateDirectory: "ferry",
      ProtectSystem: "strict",
      NoNewPrivileges: "yes",
      EnvironmentFile: "/etc/ferry/ferry.env",
    };
    for (const [name, expected] of Object.entries(settled)) assert.equal(value(name), expected, name);
    assert.equal(value("MemoryDenyWriteExecute"), "", "V8 compiles at run time");
    assert.match(value("ExecStartPre"), /ferry check -c \/etc\/ferry\/ferry\.yaml$/);
    assert.match(value("ExecStart"), /ferry serve -c \/etc\/ferry\/ferry\.yaml$/);
    assert.ok(Number(value("TimeoutStopSec")) * 1000 > config.config!.limits.drainMs);
  });

  test("the example of its environment holds names and no values", () => {
    const names = read("deploy/systemd/ferry.env.example")
      .split("\n")
      .filter((line) => /^#?[A-Z]/.test(line));
    assert.deepEqual(names, ["FERRY_ADMIN_TOKEN=", "#REDIS_URL="]);
  });
});

test("deploy/edge/envoy.yaml: where it leads, how long it waits, and when it tries again", () => {
  const text = read("deploy/edge/envoy.yaml");
  const { static_resources: edge } = parse(text) as {
    static_resources: { clusters: { name: string; load_assignment: { cluster_name: string } }[] };
  };
  const clusters = edge.clusters.map(({ name }) => name);
  assert.deepEqual(clusters, ["ferry", "ferry_grpc"]);
  for (const { name, load_assignment } of edge.clusters) assert.equal(load_assignment.cluster_name, name);
  for (const [, name] of text.matchAll(/^ +cluster: (\w+)$/gm))
    assert.ok(clusters.includes(name!), `no cluster ${name}`);
  const { limits } = config.config!;
  for (const [, seconds] of text.matchAll(/^ +timeout: (\d+)s$/gm))
    if (Number(seconds) > 2) assert.ok(Number(seconds) * 1000 > MAX_POLL_MS);
  for (const [, seconds] of text.matchAll(/common_http_protocol_options: \{ idle_timeout: (60)s/g))
    assert.ok(Number(seconds) * 1000 < limits.keepAliveTimeoutMs);
  assert.match(text, /retry_on: connect-failure,refused-stream\n/);
});
