/** TLS to workers behind gRPC, both sides with certificates; a server of grpc-js at the other end. */
import assert from "node:assert/strict";
import { createServer } from "node:https";
import { once } from "node:events";
import type { AddressInfo } from "node:net";
import { after, describe, test } from "node:test";
import { ServerCredentials } from "@grpc/grpc-js";
import type { Reply } from "../../../src/workers/backend/backend.ts";
import type { WorkerTlsOptions } from "../../../src/workers/backend/worker-tls.ts";
import { Authority, type Pair } from "../../fixtures/certificates.ts";
import { batchOf, outputsOf } from "../../contract/backend.ts";
import { OipServer } from "../../gateway/protocol/oip-service.ts";
import { assertReply, backendFor, echo, never, TextWorker } from "./grpc-stage.ts";

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

/** A worker that talks only to those whom the authority signed, if it is strict. */
async function listen({ cert, key }: Pair, strict: boolean): Promise<OipServer> {
  const pair = { cert_chain: Buffer.from(cert), private_key: Buffer.from(key) };
  const credentials = ServerCredentials.createSsl(Buffer.from(authority.own.cert), [pair], strict);
  return OipServer.listen(echo, { credentials });
}

async function run(port: number, tls: Partial<WorkerTlsOptions>, rounds = 1): Promise<Reply> {
  const backend = backendFor([`grpcs://localhost:${port}`], { tls: { reloadMs: 20, ...tls } });
  await backend.start();
  const worker = new TextWorker(backend.workers[0]!);
  let reply: Reply | undefined;
  for (let round = 0; round < rounds; round++) {
    const batch = batchOf(["1", '"é"']);
    reply = await worker.run(batch, never);
    if (reply.kind === "answered") assert.deepEqual(outputsOf(batch, reply), ["1", '"é"']);
  }
  await backend.stop();
  return reply!;
}

describe("grpcs", () => {
  test("both sides show certificates that the other trusts", async () => {
    await using far = await listen(server, true);
    assert.equal((await run(far.port, showing(client), 3)).kind, "answered");
  });

  test("no byte of a batch goes to a worker with which no TLS is agreed on", async () => {
    await using strict = await listen(server, true);
    const refused = await run(strict.port, trusting);
    assertReply(refused, "failed", /^TLS: .*certificate.*certFile/, "nobody");
    assertReply(await run(strict.port, showing(stranger.issue())), "failed", /^TLS: /, "nobody");
    assert.equal(strict.requests.length, 0);
    await using other = await listen(stranger.issue(), false);
    assertReply(
      await run(other.port, trusting),
      "failed",
      /^TLS: .*not from an authority we trust/,
      "nobody",
    );
    await using named = await listen(authority.issue({ names: "DNS:other" }), false);
    assertReply(await run(named.port, trusting), "failed", /^TLS: .*another name/, "nobody");
    assert.equal((await run(named.port, { ...trusting, serverName: "other" })).kind, "answered");
  });

  test("a server without TLS, and one without HTTP/2", async () => {
    await using plain = await OipServer.listen(echo);
    assertReply(await run(plain.port, trusting), "failed", /^TLS: /, "nobody");
    const https = createServer({ cert: server.cert, key: server.key }).listen(0, "127.0.0.1");
    await once(https, "listening");
    const { port } = https.address() as AddressInfo;
    assertReply(await run(port, trusting), "failed", /does not speak HTTP\/2/, "worker");
    https.close();
  });

  test("a worker whose address was looked up shows a certificate for the name", async () => {
    await using far = await listen(authority.issue({ names: "DNS:gpu.default.svc" }), false);
    const backend = backendFor([], { tls: { reloadMs: 20, ...trusting } });
    await backend.start();
    const worker = await backend.grow(`grpcs://127.0.0.1:${far.port}`, `gpu.default.svc:${far.port}`);
    const batch = batchOf(["1"]);
    assert.deepEqual(outputsOf(batch, await new TextWorker(worker).run(batch, never)), ["1"]);
    await backend.stop();
  });
});
