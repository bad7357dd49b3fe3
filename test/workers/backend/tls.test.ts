/** TLS to workers: who is believed, what we show, and that a batch leaves only when both sides agree. */
import assert from "node:assert/strict";
import { once } from "node:events";
import type { ServerOptions } from "node:https";
import type { TLSSocket } from "node:tls";
import { after, describe, test } from "node:test";
import type { Worker } from "../../../src/workers/backend/backend.ts";
import { HttpBackend } from "../../../src/workers/backend/http.ts";
import type { WorkerTlsOptions } from "../../../src/workers/backend/worker-tls.ts";
import { SystemClock } from "../../../src/app/clock.ts";
import { Events } from "../../../src/observe/events.ts";
import { Authority, type Pair } from "../../fixtures/certificates.ts";
import { assertOneLine, batchOf, outputsOf } from "../../contract/backend.ts";
import { type Behaviour, echo, StubWorker } from "./stub-worker.ts";

const never = new AbortController().signal;
const authority = new Authority("Workers");
const stranger = new Authority("Stranger");
const server = authority.issue();
const client = authority.issue({ names: "DNS:ferry" });
after(() => {
  authority[Symbol.dispose]();
  stranger[Symbol.dispose]();
});

const trusting = { caFile: authority.own.certFile };
const showing = ({ certFile, keyFile }: Pair): Partial<WorkerTlsOptions> => ({
  ...trusting,
  certFile,
  keyFile,
});
const serving = ({ cert, key }: Pair, more: ServerOptions = {}): ServerOptions => ({ cert, key, ...more });
/** A worker that talks only to those whom the authority signed. */
const strict: ServerOptions = { ca: authority.own.cert, requestCert: true, rejectUnauthorized: true };

async function backendFor(
  url: string,
  tls: Partial<WorkerTlsOptions>,
  events = new Events(),
): Promise<HttpBackend> {
  const health = { askMs: 1000, askTimeoutMs: 2000, failures: 3 };
  const options = { workers: [url], maxReplyBytes: 100_000, health, tls: { reloadMs: 20, ...tls } };
  const backend = new HttpBackend(options, { model: "m", clock: new SystemClock(), events });
  await backend.start();
  return backend;
}

async function withWorker(
  far: ServerOptions,
  tls: Partial<WorkerTlsOptions>,
  check: (worker: Worker, stub: StubWorker) => Promise<void>,
): Promise<void> {
  await using stub = await StubWorker.listen(echo, far);
  const backend = await backendFor(stub.url, tls);
  try {
    await check(backend.workers[0]!, stub);
  } finally {
    await backend.stop();
  }
}

async function assertAnswers(worker: Worker): Promise<void> {
  const batch = batchOf(["1", '"é"']);
  assert.deepEqual(outputsOf(batch, await worker.run(batch, never)), ["1", '"é"']);
}

async function assertRefused(worker: Worker, message: RegExp): Promise<void> {
  const reply = await worker.run(batchOf(["1", "2"]), never);
  assert(reply.kind === "failed", reply.kind);
  assert.equal(reply.blame, "nobody", reply.message);
  assert.match(reply.message, message);
  assertOneLine(reply.message);
}

describe("an agreement:", () => {
  for (const maxVersion of ["TLSv1.2", "TLSv1.3"] as const) {
    test(`the worker's authority is trusted and ours is shown, ${maxVersion}`, () =>
      withWorker(serving(server, { ...strict, maxVersion }), showing(client), async (worker, stub) => {
        for (let round = 0; round < 3; round++) await assertAnswers(worker);
        const socket = stub.requests[0]!.socket as TLSSocket;
        assert.equal(socket.getProtocol(), maxVersion);
        assert.match(socket.getPeerCertificate().subjectaltname!, /ferry/);
        assert.equal(stub.connections, 1, "one connection, kept");
      }));
  }

  test("serverName stands for the host in the URL", () =>
    withWorker(
      serving(authority.issue({ names: "DNS:gpu.internal" })),
      { ...trusting, serverName: "gpu.internal" },
      async (worker, stub) => {
        await assertAnswers(worker);
        assert.equal((stub.requests[0]!.socket as TLSSocket).servername, "gpu.internal");
      },
    ));
});

describe("no agreement, and no byte of a batch:", () => {
  const cases: [name: string, far: ServerOptions, tls: Partial<WorkerTlsOptions>, message: RegExp][] = [
    [
      "another authority",
      serving(stranger.issue()),
      trusting,
      /^TLS: .*not from an authority we trust.*caFile/,
    ],
    ["it signed itself", serving(stranger.own), trusting, /^TLS: .*not from an authority we trust/],
    ["no tls group: the usual authorities", serving(server), {}, /^TLS: .*not from an authority we trust/],
    ["expired", serving(authority.issue({ days: -1 })), trusting, /^TLS: .*has expired/],
    [
      "another name",
      serving(authority.issue({ names: "DNS:other" })),
      trusting,
      /^TLS: .*another name.*serverName/,
    ],
    ["another serverName", serving(server), { ...trusting, serverName: "gpu-9" }, /^TLS: .*another name/],
    ["it wants a certificate, TLS 1.3", serving(server, strict), trusting, /^TLS: .*certificate.*certFile/],
    [
      "it wants a certificate, TLS 1.2",
      serving(server, { ...strict, maxVersion: "TLSv1.2" }),
      trusting,
      /^TLS: .*certificate.*certFile/,
    ],
    [
      "it does not know ours",
      serving(server, strict),
      showing(stranger.issue()),
      /^TLS: .*certificate.*certFile/,
    ],
    [
      "ours has ended",
      serving(server, strict),
      showing(authority.issue({ days: -1 })),
      /^TLS: .*certificate/,
    ],
    [
      "TLS 1.1",
      serving(server, { minVersion: "TLSv1", maxVersion: "TLSv1.1", ciphers: "DEFAULT@SECLEVEL=0" }),
      trusting,
      /^TLS: .*1\.2/,
    ],
  ];
  for (const [name, far, tls, message] of cases) {
    test(name, () =>
      withWorker(far, tls, async (worker, stub) => {
        for (let round = 0; round < 5; round++) await assertRefused(worker, message);
        assert.deepEqual([stub.requests.length, stub.bodies.length], [0, 0]);
      }),
    );
  }

  test("plain HTTP at an https URL", async () => {
    await using stub = await StubWorker.listen();
    const backend = await backendFor(stub.url.replace("http:", "https:"), trusting);
    await assertRefused(backend.workers[0]!, /^TLS: the worker does not speak TLS at this port/);
    await backend.stop();
    assert.equal(stub.bodies.length, 0);
  });

  test("whatever the environment says", async () => {
    process.env["NODE_TLS_REJECT_UNAUTHORIZED"] = "0";
    try {
      await withWorker(serving(stranger.issue()), {}, (worker) => assertRefused(worker, /^TLS: /));
    } finally {
      delete process.env["NODE_TLS_REJECT_UNAUTHORIZED"];
    }
  });
});

describe("files:", () => {
  test("a new certificate is shown on the next connection, which the next batch makes", async () => {
    const own = authority.issue({ names: "DNS:old" });
    const shown: (string | undefined)[] = [];
    const noting: Behaviour = (call) => {
      shown.push((call.socket as TLSSocket).getPeerCertificate().subjectaltname);
      return echo(call);
    };
    await using stub = await StubWorker.listen(noting, serving(server, strict));
    const events = new Events();
    const backend = await backendFor(stub.url, showing(own), events);
    const worker = backend.workers[0]!;
    await assertAnswers(worker);
    const told = events.next("notice", ({ level }) => level === "info");
    authority.replace(own, authority.issue({ names: "DNS:new" }));
    await told;
    await assertAnswers(worker);
    assert.deepEqual(shown, ["DNS:old", "DNS:new"]);
    const broken = events.next("notice", ({ level }) => level === "warn");
    authority.replace(own, { ...own, key: stranger.own.key });
    assert.match((await broken).message, /^model m: backend\.tls\.keyFile: is not the key/);
    await assertAnswers(worker);
    await backend.stop();
  });

  test("one that cannot be used stops the start, in one line", async () => {
    const backend = backendFor("https://127.0.0.1:1/", { ...trusting, caFile: server.keyFile });
    await assert.rejects(backend, /^Error: model m: backend\.tls\.caFile: holds no certificate in PEM/);
  });

  test("a worker that changes its certificate for a stranger's is refused from its next connection on", async () => {
    await using stub = await StubWorker.listen(echo, serving(server));
    const backend = await backendFor(stub.url, trusting);
    const worker = backend.workers[0]!;
    await assertAnswers(worker);
    stub.renew(stranger.issue());
    const { socket } = stub.requests[0]!;
    const ended = once(socket, "close");
    socket.destroy();
    await ended;
    await assertRefused(worker, /^TLS: /);
    stub.renew(server);
    await assertAnswers(worker);
    await backend.stop();
  });
});

describe("a worker whose address was looked up:", () => {
  const named = authority.issue({ names: "DNS:gpu.default.svc" });

  async function grown(
    tls: Partial<WorkerTlsOptions>,
    check: (worker: Worker, stub: StubWorker) => Promise<void>,
  ) {
    await using stub = await StubWorker.listen(echo, serving(named));
    const backend = await backendFor("https://127.0.0.1:1/", tls);
    try {
      const { port } = new URL(stub.url);
      await check(await backend.grow(stub.url, `gpu.default.svc:${port}`), stub);
    } finally {
      await backend.stop();
    }
  }

  test("its certificate is for the name, and it is asked for by the name", () =>
    grown(trusting, async (worker, stub) => {
      for (let round = 0; round < 3; round++) await assertAnswers(worker);
      const { port } = new URL(stub.url);
      assert.equal(stub.requests[0]!.headers.host, `gpu.default.svc:${port}`);
      assert.equal(worker.name, `127.0.0.1:${port}`);
      assert.equal((stub.requests[0]!.socket as TLSSocket).servername, "gpu.default.svc");
      assert.equal(stub.connections, 1, "kept between batches");
    }));

  test("serverName comes first", () =>
    grown({ ...trusting, serverName: "other" }, (worker) => assertRefused(worker, /another name/)));
});
