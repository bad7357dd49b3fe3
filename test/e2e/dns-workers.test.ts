/** Workers behind a name of DNS, with a DNS server of our own: a thousand addresses, IPv6, what comes, goes and is away. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { networkInterfaces } from "node:os";
import { test } from "node:test";
import { DnsServer } from "./dns-server.ts";
import { type Config, eventually, Ferry, Folder, runFerry, writeConfig, reloadConfig } from "./harness.ts";

/** A machine may have no IPv6; then it is one more of IPv4. */
const SIX = Object.values(networkInterfaces()).some((each) => each?.some(({ address }) => address === "::1"));
const LAST = SIX ? "::1" : "127.0.0.1";

/** Speaks `batch` at every address of this machine, and counts the addresses that it was asked at. */
class Everywhere implements AsyncDisposable {
  readonly asked = new Map<string, number>();
  readonly hosts = new Set<string>();
  readonly #server = createServer((request, response) => {
    const local = request.socket.localAddress!.replace(/^::ffff:/, "");
    this.asked.set(local, (this.asked.get(local) ?? 0) + 1);
    this.hosts.add(request.headers.host!);
    let body = "";
    request.setEncoding("utf8").on("data", (chunk: string) => (body += chunk));
    request.on("end", () => {
      const { inputs } = JSON.parse(body) as { inputs: unknown[] };
      const outputs = inputs.map((of) => ({ of }));
      response.writeHead(200, { "content-type": "application/json" }).end(JSON.stringify({ outputs }));
    });
  });

  static async listen(): Promise<Everywhere> {
    const everywhere = new Everywhere();
    everywhere.#server.listen(0, SIX ? "::" : "0.0.0.0");
    await once(everywhere.#server, "listening");
    return everywhere;
  }

  get port(): number {
    return (this.#server.address() as AddressInfo).port;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#server.close();
    this.#server.closeAllConnections();
    await once(this.#server, "close");
  }
}

/** 127.9.0.1, 127.9.0.2, … */
const some = (count: number, from = 1): string[] =>
  Array.from({ length: count }, (_, at) => `127.9.${Math.floor((from + at) / 250)}.${(from + at) % 250}`);

function configOf(dns: DnsServer, { port }: Everywhere, more: object = {}): Config {
  const lookups = { dnsMs: 200, dnsServers: [dns.address], ...more };
  const backend = { kind: "http", workers: `dns://gpu.test:${port}/infer`, ...lookups };
  const timeouts = { queueMs: 20_000, workerMs: 10_000, totalMs: 30_000 };
  return { models: [{ name: "m", backend, maxBatchSize: 1, cache: { scope: "off" }, timeouts }] };
}

const count = async (ferry: Ferry): Promise<number> => (await ferry.health()).healthy_workers;

async function becomes(ferry: Ferry, workers: number): Promise<void> {
  await eventually(async () => (await count(ferry)) === workers, 20_000);
}

test("a name with 1,000 addresses and IPv6 is 1,001 workers; they come, go and stay when DNS is away", async () => {
  await using dns = await DnsServer.listen();
  await using everywhere = await Everywhere.listen();
  dns.names.set("gpu.test", [...some(1000), LAST]);
  await using ferry = await Ferry.start(configOf(dns, everywhere));
  await becomes(ferry, 1001);
  assert.ok(dns.askedByTcp > 0, "too long for UDP");
  // Several at once, so that more than one worker is needed.
  for (let round = 0; round < 5; round++) {
    const inputs = Array.from({ length: 100 }, (_, at) => `${round} ${at}`);
    const outputs = await Promise.all(inputs.map((input) => ferry.infer(input)));
    assert.deepEqual(
      outputs,
      inputs.map((of) => ({ of })),
    );
  }
  assert.ok(everywhere.asked.size > 20, `${everywhere.asked.size} workers had work`);
  assert.deepEqual([...everywhere.hosts], [`gpu.test:${everywhere.port}`]);

  dns.names.set("gpu.test", [LAST]);
  await becomes(ferry, 1);
  everywhere.asked.clear();
  assert.deepEqual(await ferry.infer("six"), { of: "six" });
  assert.deepEqual([...everywhere.asked.keys()], [LAST]);
  const host = SIX ? `[${LAST}]` : LAST;
  const { text } = await ferry.admin("/internal/workers");
  const [row] = (JSON.parse(text) as { workers: { name: string; address: string }[] }).workers;
  assert.deepEqual(
    [row!.name, row!.address],
    [`${host}:${everywhere.port}`, `http://${host}:${everywhere.port}/infer`],
  );

  dns.silent = true;
  await ferry.line(({ msg }) => /cannot be looked up \(E?TIMEOUT\)/.test(msg ?? ""), 20_000);
  assert.deepEqual(await ferry.infer("away"), { of: "away" });
  dns.silent = false;
  dns.names.set("gpu.test", some(3));
  await becomes(ferry, 3);
});

test("after a reload other servers are asked", async () => {
  await using dns = await DnsServer.listen();
  await using other = await DnsServer.listen();
  await using everywhere = await Everywhere.listen();
  dns.names.set("gpu.test", some(30));
  other.names.set("gpu.test", some(20, 11));
  await using ferry = await Ferry.start(configOf(dns, everywhere));
  await becomes(ferry, 30);
  await reloadConfig(ferry, configOf(dns, everywhere, { dnsServers: [other.address] }));
  await becomes(ferry, 20);
  await ferry.infer("x");
});

test("ferry check --probe asks the same servers; a name that they do not know is told", async () => {
  await using dns = await DnsServer.listen();
  await using everywhere = await Everywhere.listen();
  dns.names.set("gpu.test", ["127.0.0.1", "::1"]);
  await using folder = await Folder.make();
  const checked = await runFerry([
    "check",
    "--probe",
    "-c",
    await writeConfig(folder, configOf(dns, everywhere)),
  ]);
  assert.equal(checked.code, 0, checked.stderr);
  assert.match(checked.stdout, /^dns:\/\/gpu\.test:\d+\/infer: 127\.0\.0\.1, ::1$/m);
  // The name is one of this machine's, but nobody else is asked.
  const config = configOf(dns, everywhere) as { models: { backend: { workers: string } }[] };
  config.models[0]!.backend.workers = `dns://localhost:${everywhere.port}/infer`;
  const unknown = await runFerry(["check", "--probe", "-c", await writeConfig(folder, config)]);
  assert.match(unknown.stdout + unknown.stderr, /cannot be looked up now: ENOTFOUND/);
});
