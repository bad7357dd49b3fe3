/** TLS from end to end: clients over https, workers that ask for our certificate, commands, rotation, drain. */
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { once } from "node:events";
import { readFileSync, writeFileSync } from "node:fs";
import { createServer, type Server, type ServerOptions } from "node:https";
import { connect } from "node:http2";
import type { AddressInfo } from "node:net";
import { connect as connectTls } from "node:tls";
import { after, describe, test } from "node:test";
import { promisify } from "node:util";
import { Agent, request } from "undici";
import { Authority } from "../fixtures/certificates.ts";
import { ask } from "../gateway/edge.ts";
import { assertError, eventually, Ferry, freePort, runFerry } from "./harness.ts";

const authority = new Authority();
const agent = new Agent({ allowH2: false, connect: { ca: authority.own.cert } });
const simulated = { name: "demo", backend: { kind: "simulated", workers: 1, baseMs: 5 } };
after(async () => {
  await agent.destroy();
  authority[Symbol.dispose]();
});

interface Told {
  readonly status: number;
  readonly text: string;
  readonly headers: Readonly<Record<string, unknown>>;
}

async function get(url: string): Promise<Told> {
  const { statusCode: status, headers, body } = await request(url, { dispatcher: agent });
  return { status, headers, text: await body.text() };
}

async function infer(url: string, input: unknown): Promise<Told> {
  const headers = { "content-type": "application/json" };
  const wishes = { method: "POST", headers, body: JSON.stringify({ input }), dispatcher: agent } as const;
  const answer = await request(`${url}/v1/inference`, wishes);
  return { status: answer.statusCode, headers: answer.headers, text: await answer.body.text() };
}

async function subjectOf(url: string): Promise<string> {
  const socket = connectTls({ port: Number(new URL(url).port), host: "127.0.0.1", ca: authority.own.cert });
  await once(socket, "secureConnect");
  const { subjectaltname } = socket.getPeerCertificate();
  socket.destroy();
  return subjectaltname!;
}

describe("the edge", () => {
  test("both listeners speak https, h2 and HTTP/1.1, and every printed URL says so", async () => {
    const { certFile, keyFile } = authority.issue();
    const admin = { listen: "127.0.0.1:0", tls: true };
    await using ferry = await Ferry.start({ tls: { certFile, keyFile }, admin, models: [simulated] });
    assert.match(ferry.url, /^https:/);
    assert.match(ferry.adminUrl, /^https:/);
    const first = await infer(ferry.url, "hello");
    assert.equal(first.status, 200, first.text);
    assert.match((await get(`${ferry.adminUrl}/internal/health`)).text, /"status":"ok"/);
    const session = connect(ferry.url, { ca: authority.own.cert });
    const body = '{"input":"over h2"}';
    const headers = { "content-type": "application/json" };
    const answer = await ask(session, { method: "POST", path: "/v1/inference", headers, body });
    assert.equal(answer.status, 200, answer.text);
    assert.equal((JSON.parse(answer.text) as { output: string }).output, "over h2");
    session.destroy();
    const dead = await runFerry(["dead", "list", "-c", ferry.configFile, "--admin", ferry.adminUrl]);
    assert.deepEqual([dead.code, dead.stdout, dead.stderr], [0, "no dead letters\n", ""]);
  });

  test("ferry dead finds the listener of its config, though the certificate has another name", async () => {
    const { certFile, keyFile } = authority.issue({ names: "DNS:ferry.example" });
    const admin = { listen: `127.0.0.1:${await freePort()}`, tls: true };
    await using ferry = await Ferry.start({ tls: { certFile, keyFile }, admin, models: [simulated] });
    const dead = await runFerry(["dead", "list", "-c", ferry.configFile]);
    assert.deepEqual([dead.code, dead.stdout, dead.stderr], [0, "no dead letters\n", ""]);
    // Another certificate in the file is another listener.
    authority.replace({ certFile, keyFile, cert: "", key: "" }, authority.issue());
    await ferry.line(({ msg }) => /the files changed/.test(String(msg)));
    using other = new Authority();
    writeFileSync(certFile, other.own.cert);
    const stranger = await runFerry(["dead", "list", "-c", ferry.configFile]);
    assert.equal(stranger.code, 1);
    assert.match(stranger.stderr, /certificate that cannot be trusted .*; if that is new, .*SIGHUP/);
  });

  test("curl, which ends the handshake its own way", async () => {
    const { certFile, keyFile } = authority.issue();
    await using ferry = await Ferry.start({ tls: { certFile, keyFile }, models: [simulated] });
    for (const version of ["--http1.1", "--http2"]) {
      const words = ["-s", version, "--cacert", authority.own.certFile, "-w", "%{http_version}"];
      const { stdout } = await promisify(execFile)("curl", [...words, `${ferry.url}/healthz`]);
      assert.equal(stdout, `{"status":"ok"}${version === "--http2" ? "2" : "1.1"}`);
    }
    await assert.rejects(promisify(execFile)("curl", ["-s", ferry.url.replace("https:", "http:")]));
    const told = ferry.lines.filter(({ level, path }) => level !== "info" && path === undefined);
    assert.deepEqual(told, [], "nothing is logged about a client that does not speak TLS");
  });

  test("a renewed certificate is used without a restart, a broken one is not", async () => {
    const pair = authority.issue();
    const tls = { certFile: pair.certFile, keyFile: pair.keyFile };
    await using ferry = await Ferry.start({ tls, models: [simulated] });
    authority.replace(pair, authority.issue({ names: "DNS:renewed,IP:127.0.0.1" }));
    await ferry.line(({ msg }) => /the files changed/.test(String(msg)));
    assert.match(await subjectOf(ferry.url), /renewed/);
    writeFileSync(pair.keyFile, "half");
    await ferry.line(({ msg }) => /^tls\.keyFile: holds no .*; what was read before stays/.test(String(msg)));
    assert.match(await subjectOf(ferry.url), /renewed/);
  });

  test("a reload uses a renewed certificate at once; one that does not fit its key stops all of it", async () => {
    const pair = authority.issue();
    const tls = { certFile: pair.certFile, keyFile: pair.keyFile };
    await using ferry = await Ferry.start({ tls, models: [simulated] });
    const renewed = authority.issue({ names: "DNS:renewed,IP:127.0.0.1" });
    writeFileSync(pair.keyFile, renewed.key);
    writeFileSync(ferry.configFile, readFileSync(ferry.configFile, "utf8").replace('"demo"', '"other"'));
    const refused = await ferry.admin("/internal/reload", "POST");
    assert.equal(refused.status, 422, refused.text);
    assert.match(
      refused.text,
      /"problems":\["tls\.keyFile: is not the key of the certificate in tls\.certFile"\]/,
    );
    assert.match((await infer(ferry.url, 1)).text, /"model":"demo"/);
    assert.doesNotMatch(await subjectOf(ferry.url), /renewed/);
    writeFileSync(pair.certFile, renewed.cert);
    const taken = await ferry.admin("/internal/reload", "POST");
    assert.equal(taken.status, 200, taken.text);
    assert.match(await subjectOf(ferry.url), /renewed/);
    assert.match((await infer(ferry.url, 1)).text, /"model":"other"/);
  });

  test("what cannot be used is one line and exit 1; what ends soon is a warning", async () => {
    const { certFile, keyFile } = authority.issue({ days: 3 });
    await using ferry = await Ferry.start({ tls: { certFile, keyFile }, models: [simulated] });
    await ferry.line(({ level, msg }) => level === "warn" && /ends on .*, in [23] days/.test(String(msg)));
    const check = await runFerry(["check", "-c", ferry.configFile]);
    assert.equal(check.code, 0);
    assert.match(check.stderr, /tls\.certFile +warning: the certificate ends on/);
    writeFileSync(certFile, "nothing");
    for (const command of ["check", "serve"]) {
      const { code, stdout, stderr } = await runFerry([command, "-c", ferry.configFile]);
      assert.equal(code, 1);
      assert.match(stdout + stderr, /tls\.certFile:? +holds no certificate in PEM/);
    }
  });

  test("SIGTERM ends connections of both kinds, and the request that waits is answered", async () => {
    const { certFile, keyFile } = authority.issue();
    const slow = { name: "slow", backend: { kind: "simulated", workers: 1, baseMs: 4000 } };
    const ferry = await Ferry.start({
      tls: { certFile, keyFile },
      models: [slow],
      limits: { drainMs: 50_000 },
    });
    const session = connect(ferry.url, { ca: authority.own.cert });
    const headers = { "content-type": "application/json" };
    const asked = { method: "POST", path: "/v1/inference", headers, body: '{"input":"last"}' };
    const waiting = [ask(session, asked), infer(ferry.url, "last of HTTP/1.1")];
    await ferry.healthy(({ running, queue_depth: queued }) => running + queued === 2);
    const { code } = await ferry.stop();
    assert.equal(code, 0);
    for (const { status, text } of await Promise.all(waiting)) assert.equal(status, 200, text);
    await ferry[Symbol.asyncDispose]();
  });
});

describe("workers", () => {
  async function worker(options: ServerOptions): Promise<{ server: Server; url: string; bodies: string[] }> {
    const bodies: string[] = [];
    const server = createServer(options, (incoming, response) => {
      if (incoming.method === "GET") return void response.end('{"load":0.5}');
      let body = "";
      incoming.setEncoding("utf8").on("data", (text: string) => (body += text));
      incoming.on("end", () => {
        bodies.push(body);
        const { inputs } = JSON.parse(body) as { inputs: unknown[] };
        response.end(JSON.stringify({ outputs: inputs }));
      });
    });
    server.listen(0, "127.0.0.1");
    await once(server, "listening");
    return { server, bodies, url: `https://127.0.0.1:${(server.address() as AddressInfo).port}/infer` };
  }

  test("with certificates on both sides: answered; without ours: 503, and no byte of it", async () => {
    const { cert, key } = authority.issue();
    const own = authority.issue();
    const far = await worker({
      cert,
      key,
      ca: authority.own.cert,
      requestCert: true,
      rejectUnauthorized: true,
    });
    const model = (tls: object, more: object = {}) => {
      return { name: "m", backend: { kind: "http", workers: [far.url], tls }, ...more };
    };
    const { certFile, keyFile } = own;
    const caFile = authority.own.certFile;
    try {
      await using good = await Ferry.start({ models: [model({ caFile, certFile, keyFile })] });
      assert.equal(await good.infer("secret"), "secret");
      const probe = await runFerry(["check", "-c", good.configFile, "--probe"]);
      assert.match(probe.stdout, /workers: 1 of 1 take connections/);
      far.bodies.length = 0;
      const timeouts = { queueMs: 2000, workerMs: 2000, totalMs: 3000 };
      await using bad = await Ferry.start({ models: [model({ caFile }, { timeouts })] });
      // Nobody knows before the first batch; it costs the task no attempt, and its deadline is what ends it.
      await bad.accept({ input: "first" });
      const down = await bad.line(({ state }) => state === "down");
      assert.match(String(down["why"]), /^TLS: .*certificate.*check backend\.tls\.certFile/);
      // It is down for a second: a request may come when it is tried again.
      let refused = await bad.post({ input: "second" });
      await eventually(async () => (refused = await bad.post({ input: "second" })).status === 503);
      assertError(refused, 503, "SERVICE_OVERLOADED");
      assert.deepEqual(far.bodies, []);
      const told = await runFerry(["check", "-c", bad.configFile, "--probe"]);
      assert.equal(told.code, 1);
      assert.match(told.stdout, /models\[0\]\.backend\.workers\[0\] +TLS: .*certificate/);
    } finally {
      far.server.closeAllConnections();
      far.server.close();
    }
  });
});
