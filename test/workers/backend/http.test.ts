import assert from "node:assert/strict";
import { once } from "node:events";
import { type AddressInfo, createServer } from "node:net";
import { describe, test } from "./suite.ts";
import { setImmediate as turn } from "node:timers/promises";
import type { Reply, Worker } from "../../../src/workers/backend/backend.ts";
import { HttpBackend, type HttpOptions, retryAfterMs } from "../../../src/workers/backend/http.ts";
import { PassThroughWorkers } from "../../../src/workers/backend/passthrough.ts";
import { SystemClock } from "../../../src/app/clock.ts";
import { kserveV1 } from "../../../src/gateway/protocol/kserve-v1.ts";
import { oipV2 } from "../../../src/gateway/protocol/oip-v2.ts";
import type { WorkerSide } from "../../../src/gateway/protocol/protocol.ts";
import { tei } from "../../../src/gateway/protocol/tei.ts";
import { Events } from "../../../src/observe/events.ts";
import { CRASH, REJECT, assertOneLine, backendContract, batchOf, outputsOf } from "../../contract/backend.ts";
import { OipServer, type Rules } from "../../gateway/protocol/servers/oip.ts";
import { type Behaviour, StubWorker, echo, endless, hang, saying, status } from "./stub-worker.ts";

const never = new AbortController().signal;
const MAX_REPLY_BYTES = 1_000_000;
function backendFor(...urls: string[]): HttpBackend {
  return backendWith({}, ...urls);
}

function backendWith(more: Partial<HttpOptions>, ...urls: string[]): HttpBackend {
  const health = { askMs: 1000, askTimeoutMs: 2000, failures: 3 };
  const options = { workers: urls, maxReplyBytes: MAX_REPLY_BYTES, health, tls: { reloadMs: 2000 } };
  return new HttpBackend(
    { ...options, ...more },
    { model: "m", clock: new SystemClock(), events: new Events() },
  );
}

/** Runs `check` on a worker whose far end behaves like this. */
async function withStub(
  behave: Behaviour,
  check: (worker: Worker, stub: StubWorker) => Promise<void>,
): Promise<void> {
  await using stub = await StubWorker.listen(behave);
  const backend = backendFor(stub.url);
  try {
    await check(backend.workers[0]!, stub);
  } finally {
    await backend.stop();
  }
}

async function replyTo(behave: Behaviour, inputs = ["1", "2"]): Promise<Reply> {
  let reply: Reply | undefined;
  await withStub(behave, async (worker) => void (reply = await worker.run(batchOf(inputs), never)));
  return reply!;
}

async function assertReply(
  behave: Behaviour,
  kind: Reply["kind"],
  message: RegExp,
  blame?: string,
): Promise<void> {
  const reply = await replyTo(behave);
  assert(reply.kind !== "answered", "answered");
  assert.equal(reply.kind, kind, reply.message);
  assert.match(reply.message, message);
  assertOneLine(reply.message);
  if (reply.kind === "failed") assert.equal(reply.blame, blame);
}

backendContract("http", async (mood, workers) => {
  const answer: Behaviour = async (call) => {
    if (call.inputs.includes(JSON.parse(REJECT))) return status(422, {}, "refused")(call);
    if (call.inputs.includes(JSON.parse(CRASH))) return void call.socket.destroy();
    if (mood === "hang") return;
    if (mood === "short") return saying(JSON.stringify({ outputs: call.inputs.slice(1) }))(call);
    // Answers take a different number of turns, so that aborts hit every stage.
    for (let turns = call.body.length % 5; turns > 0; turns--) await turn();
    return echo(call);
  };
  const stubs = await Promise.all(Array.from({ length: workers }, () => StubWorker.listen(answer)));
  return Object.assign(backendFor(...stubs.map((stub) => stub.url)), {
    [Symbol.asyncDispose]: async () => {
      for (const stub of stubs) await stub[Symbol.asyncDispose]();
    },
  });
});

describe("http, what is sent:", () => {
  test("texts go out and come back untouched, on one kept connection, one at a time", () =>
    withStub(echo, async (worker, stub) => {
      const inputs = ["9223372036854775807", "1.50", '{"b" : 1, "a":[ ]}', '"\\u00e9\\/"', "1e-7"];
      for (let round = 0; round < 20; round++) {
        const batch = batchOf(inputs);
        assert.deepEqual(outputsOf(batch, await worker.run(batch, never)), inputs);
      }
      assert.equal(stub.bodies[0], `{"inputs":[${inputs.join(",")}]}`);
      assert.equal(stub.requests[0]!.url, "/infer?v=1");
      assert.equal(stub.requests[0]!.headers["content-type"], "application/json");
      assert.equal(stub.connections, 1);
      assert.equal(stub.mostAtOnce, 1);
    }));

  test("parameters stand beside the inputs, and only when there are any", () =>
    withStub(echo, async (worker, stub) => {
      const batch = batchOf(["1"], '{"top_k":5}');
      assert.deepEqual(outputsOf(batch, await worker.run(batch, never)), ["1"]);
      assert.equal(stub.bodies[0], '{"inputs":[1],"parameters":{"top_k":5}}');
    }));

  test("credentials in the URL become a header and never part of the name", async () => {
    await using stub = await StubWorker.listen();
    const url = new URL(stub.url);
    url.username = "us%C3%A9r";
    url.password = "p%40ss";
    const backend = backendFor(url.href);
    await backend.workers[0]!.run(batchOf(["1"]), never);
    await backend.stop();
    assert.equal(
      stub.requests[0]!.headers.authorization,
      `Basic ${Buffer.from("usér:p@ss").toString("base64")}`,
    );
    assert.equal(backend.workers[0]!.name, url.host);
  });

  test("where clients' own credentials go on, a caller without one does not get the URL's", async () => {
    await using stub = await StubWorker.listen();
    const url = new URL(stub.url);
    url.username = "ferry";
    url.password = "of-the-url";
    const vault = { find: () => "Bearer own" };
    const backend = backendWith({ vault }, url.href);
    for (const parameters of ["", '{"$auth":"name"}'])
      await backend.workers[0]!.run(batchOf(["1"], parameters), never);
    await backend.stop();
    const clock = new SystemClock();
    const workers = (): { address: string; well: boolean }[] => [{ address: url.href, well: true }];
    const options = { model: "m", workers, basePath: () => "", tls: { reloadMs: 2000 }, ejectMs: 1000 };
    const passage = new PassThroughWorkers(options, clock, new Events());
    for (const authorization of [null, "Bearer own"]) {
      const parcel = {
        method: "POST",
        path: "/x",
        headers: [],
        authorization,
        body: () => Buffer.from("{}"),
      };
      await new Promise<void>((resolve, reject) => {
        const receiver = { started: () => {}, data: () => true, ended: resolve, failed: reject };
        passage.send(parcel, receiver);
      });
    }
    await passage.stop();
    const shown = stub.requests.map(({ headers }) => headers.authorization);
    assert.deepEqual(shown, [undefined, "Bearer own", undefined, "Bearer own"]);
  });

  test("names are as short as they can be and still differ", () => {
    const names = (...urls: string[]): string[] => backendFor(...urls).workers.map((worker) => worker.name);
    assert.deepEqual(names("http://a:1/x", "http://b:1/x"), ["a:1", "b:1"]);
    assert.deepEqual(names("http://a:1/x", "http://a:1/y"), ["a:1/x", "a:1/y"]);
    assert.deepEqual(names("http://a:1/x", "http://a:1/x"), ["a:1/x#1", "a:1/x#2"]);
  });
});

describe("http, replies that cannot be used:", () => {
  const cases: [name: string, body: string | Buffer, message: RegExp][] = [
    ["too few outputs", '{"outputs":[1]}', /1 output for 2 inputs/],
    ["too many outputs", '{"outputs":[1,2,3]}', /3 outputs for 2 inputs/],
    ["no outputs", '{"outputs":[]}', /0 outputs for 2 inputs/],
    ["another field", '{"predictions":[1,2]}', /has no "outputs"/],
    ["outputs twice", '{"outputs":[1,2],"outputs":[2,1]}', /has "outputs" twice/],
    ["an object of outputs", '{"outputs":{"0":1,"1":2}}', /not an array/],
    ["a bare array", "[1,2]", /is not an object/],
    ["NaN", '{"outputs":[NaN,1]}', /is not JSON .*NaN/],
    ["Infinity", '{"outputs":[1,-Infinity]}', /is not JSON/],
    ["a number beyond double", '{"outputs":[1,[1e400]]}', /beyond the range of a double/],
    ["a cut-off text", '{"outputs":[1,2', /is not JSON/],
    ["nothing", "", /is not JSON/],
    ["invalid UTF-8", Buffer.from([0x7b, 0x22, 0xff, 0x22, 0x7d]), /is not UTF-8/],
  ];
  for (const [name, body, message] of cases) {
    test(name, () => assertReply(saying(body), "unusable", message));
  }

  test("an HTML page is named as such", () =>
    assertReply(saying("<!doctype html>\n<p>Login</p>", "text/html"), "unusable", /not JSON \(text\/html\)/));

  test("JSON under the wrong content type is JSON", async () => {
    const reply = await replyTo(saying('{"outputs":["a","b"]}', "text/plain"));
    assert.equal(reply.kind, "answered");
  });

  test("a reply without end is cut at maxReplyBytes and the connection destroyed", () =>
    withStub(endless, async (worker, stub) => {
      const arrival = stub.arrival();
      const running = worker.run(batchOf(["1"]), never);
      const closed = once((await arrival).response, "close");
      const reply = await running;
      assert.deepEqual(reply, {
        kind: "unusable",
        message: "worker's reply is larger than maxReplyBytes (1000000)",
      });
      await closed;
      stub.behave = echo;
      const batch = batchOf(["7"]);
      assert.deepEqual(outputsOf(batch, await worker.run(batch, never)), ["7"]);
      assert.equal(stub.connections, 2);
    }));

  test("a reply that announces too many bytes is not read at all", () =>
    withStub(
      ({ response }) => response.writeHead(200, { "content-length": "1073741824" }).flushHeaders(),
      async (worker) => {
        const reply = await worker.run(batchOf(["1"]), never);
        assert.equal(reply.kind, "unusable");
      },
    ));

  test("a reply of exactly maxReplyBytes is fine", async () => {
    const body = `{"outputs":["${"x".repeat(MAX_REPLY_BYTES - 16)}"]}`;
    assert.equal(body.length, MAX_REPLY_BYTES);
    assert.equal((await replyTo(saying(body), ["1"])).kind, "answered");
  });
});

describe("http, refusals:", () => {
  const rejected = [400, 402, 406, 409, 410, 413, 415, 418, 422, 431, 451];
  const failed = [401, 403, 404, 405, 407, 408, 500, 501, 502, 504, 599];
  const redirects = [300, 301, 302, 303, 304, 307, 308];

  test("4xx about the input are `rejected`, with the worker's words in one line", async () => {
    for (const code of rejected) {
      const words = "input 2 is\n\u001b[31mtoo long\r\n";
      await assertReply(
        status(code, {}, words),
        "rejected",
        new RegExp(`^worker answered ${code}: input 2 is \\[31mtoo`),
      );
    }
  });

  test("4xx about the URL or the credentials, 408 and 5xx are `failed` and blame the worker", async () => {
    for (const code of failed) {
      await assertReply(
        status(code, {}, "oops"),
        "failed",
        new RegExp(`^worker answered ${code}: oops`),
        "worker",
      );
    }
    await assertReply(status(404), "failed", /check the worker's URL/, "worker");
    await assertReply(status(401), "failed", /credentials/, "worker");
  });

  /** One worker of this protocol that refuses with these words; its reply to a batch. */
  async function refusalOf(
    code: number,
    words: string,
    { parameters = "", inputs = ['"a text"'], ...more }: Refused = {},
  ): Promise<Reply> {
    await using stub = await StubWorker.listen(status(code, {}, words));
    const health = { askMs: 1000, askTimeoutMs: 2000, failures: 3 };
    const options = { workers: [stub.url], maxReplyBytes: MAX_REPLY_BYTES, health, tls: { reloadMs: 2000 } };
    const around = { model: "m", clock: new SystemClock(), events: new Events() };
    const backend = new HttpBackend({ ...options, ...more }, around);
    try {
      return await backend.workers[0]!.run({ ...batchOf(inputs), parameters }, never);
    } finally {
      await backend.stop();
    }
  }

  interface Refused {
    readonly parameters?: string;
    readonly inputs?: string[];
    readonly protocol?: WorkerSide;
    readonly vault?: { find(name: string): string | undefined };
    readonly authorization?: string;
  }

  const rows = (more: string) => ({
    protocol: oipV2.worker,
    parameters: `{"inputs":[{"datatype":"FP32","name":"in0","shape":[1]}]${more}}`,
    inputs: ["[[1]]"],
  });

  test("404 and 405 are the client's where it chose the path, or the worker repeats what it named", async () => {
    const found: [words: string, asked: Refused][] = [
      ["not here", rows(',"version":"7"')],
      ["not here", { protocol: kserveV1.worker, parameters: '{"$version":"7"}', inputs: ["1"] }],
      ["", { protocol: tei.worker, parameters: '{"$route":"embed_sparse"}' }],
      ["no adapter 'lora-7' is loaded", { parameters: '{"adapter":"lora-7"}' }],
      ['{"error":"no signature sig"}', { parameters: '{"options":{"signature_name":"sig"}}' }],
      ["unexpected inference output out9", rows(',"outputs":[{"name":"out9"}]')],
    ];
    for (const code of [404, 405]) {
      for (const [words, asked] of found) {
        const reply = await refusalOf(code, words, asked);
        assert(reply.kind === "rejected", `${reply.kind} ${words}`);
        assert.equal(reply.code, "NOT_FOUND", words);
        assert.match(reply.message, new RegExp(`^worker answered ${code}`));
        assert.equal(reply.brief, `worker answered ${code} (check the worker's URL)`);
      }
    }
  });

  test("without that they are the worker's", async () => {
    const found: [words: string, asked: Refused][] = [
      ["", rows("")],
      ['{"detail":"Not Found"}', { parameters: '{"adapter":"lora-7","n":1}' }],
      // The model's own name, a key, a part of a longer word, and a single letter say nothing.
      ["unknown model 'm', adapter lora-77", { parameters: '{"model":"m","adapter":"lora-7","x":"l"}' }],
      ["Request for unknown model: 'm' is not found", rows(',"outputs":[{"name":"out0"}]')],
    ];
    for (const [words, asked] of found) {
      const reply = await refusalOf(404, words, asked);
      assert(reply.kind === "failed", `${reply.kind} ${words}`);
      assert.equal(reply.blame, "worker");
    }
  });

  test("503 says whether it is about what the client named", async () => {
    for (const [words, asked, named] of [
      ["not ready", rows(',"version":"7"'), true],
      ["adapter lora-7 is loading", { parameters: '{"adapter":"lora-7"}' }, true],
      ["queue is full", { parameters: '{"adapter":"lora-7"}' }, false],
      ["queue is full", rows(""), false],
    ] as const) {
      const reply = await refusalOf(503, words, asked);
      assert(reply.kind === "busy");
      assert.equal(reply.named, named, words);
    }
  });

  test("what a worker could not fetch or may not read of an input is about that input", async () => {
    const input = '{"image":"https://example.com/cat.png"}';
    for (const code of [401, 403, 404]) {
      const reply = await refusalOf(code, `${code} for url https://example.com/cat.png`, { inputs: [input] });
      assert(reply.kind === "rejected");
      assert.equal(reply.code, undefined);
    }
  });

  test("401, 403 and 429 are the client's where its own credential was sent, or it sent none", async () => {
    const vault = { find: () => "Bearer of-the-client" };
    const codes = [
      [401, "UNAUTHENTICATED"],
      [403, "FORBIDDEN"],
      [429, "RATE_LIMITED"],
    ] as const;
    for (const [code, name] of codes) {
      for (const parameters of ['{"$auth":"x"}', ""]) {
        const reply = await refusalOf(code, "no", { vault, parameters });
        assert(reply.kind === "rejected", reply.kind);
        assert.equal(reply.code, name);
      }
      const ours = await refusalOf(code, "no", { vault, authorization: "Bearer ours" });
      assert.equal(ours.kind, code === 429 ? "busy" : "failed");
    }
  });

  test("redirects are `failed` and never followed", async () => {
    await using other = await StubWorker.listen();
    for (const code of redirects) {
      await assertReply(
        status(code, { location: other.url }),
        "failed",
        /redirects are not followed/,
        "worker",
      );
    }
    assert.equal(other.connections, 0);
  });

  test("429 and 503 are `busy` for as long as they say", async () => {
    const forms: [headers: Record<string, string>, ms: number][] = [
      [{ "retry-after": "2" }, 2000],
      [{ "retry-after": "0.5" }, 500],
      [{ "retry-after-ms": "250", "retry-after": "9" }, 250],
      [{ "retry-after": "0" }, 10],
      [{ "retry-after": "86400" }, 30_000],
      [{ "retry-after": "soon" }, 1000],
      [{}, 1000],
    ];
    for (const code of [429, 503]) {
      for (const [headers, ms] of forms) {
        const reply = await replyTo(status(code, headers, "later"));
        assert.deepEqual(reply, {
          kind: "busy",
          message: `worker answered ${code}: later`,
          brief: `worker answered ${code}`,
          retryAfterMs: ms,
          named: false,
        });
      }
    }
  });

  test("Retry-After may be a date", () => {
    const now = Date.UTC(2026, 0, 1, 12, 0, 0);
    const at = (seconds: number): string => new Date(now + seconds * 1000).toUTCString();
    assert.equal(retryAfterMs({ "retry-after": at(5) }, now), 5000);
    assert.equal(retryAfterMs({ "retry-after": at(-5) }, now), 10);
    assert.equal(retryAfterMs({ "retry-after": at(5000) }, now), 30_000);
    assert.equal(retryAfterMs({ "retry-after": [at(3), at(4)] }, now), 3000);
  });

  test("an error page of any size is quoted, not read", () =>
    withStub(
      async (call) => {
        call.response.statusCode = 500;
        call.response.write("x".repeat(300));
        return endless({
          ...call,
          response: Object.assign(call.response, { writeHead: () => call.response }),
        });
      },
      async (worker) => {
        const reply = await worker.run(batchOf(["1"]), never);
        assert(reply.kind === "failed");
        assert(reply.message.length < 230, reply.message);
      },
    ));

  test("early hints are not the answer", async () => {
    const reply = await replyTo((call) => {
      call.response.writeEarlyHints({ link: "</a>; rel=preload" });
      return echo(call);
    });
    assert.equal(reply.kind, "answered");
  });
});

describe("http, a worker that may lack an extension of its protocol:", () => {
  const parameters = '{"binary":true,"inputs":[{"datatype":"FP32","name":"x","shape":[1]}]}';
  const bf16 = parameters.replace("FP32", "BF16");
  const row = `["${Buffer.from(Float32Array.of(1.5).buffer).toString("base64")}"]`;
  const batch = { ...batchOf([row]), parameters };

  async function withServer(
    rules: Rules,
    check: (worker: Worker, server: OipServer) => Promise<void>,
  ): Promise<void> {
    await using server = await OipServer.listen(rules);
    const health = { askMs: 1000, askTimeoutMs: 2000, failures: 3 };
    const options = { maxReplyBytes: MAX_REPLY_BYTES, health, tls: { reloadMs: 2000 } };
    const around = { model: "toy", clock: new SystemClock(), events: new Events() };
    const workers = [server.endpoint()];
    const backend = new HttpBackend({ ...options, workers, protocol: oipV2.worker }, around);
    try {
      await check(backend.workers[0]!, server);
    } finally {
      await backend.stop();
    }
  }

  for (const code of [400, 415, 422, 500, 501]) {
    test(`answers ${code} to it: the batch is sent again as JSON, and so is every one after it`, () =>
      withServer({ jsonOnly: code }, async (worker, server) => {
        for (let n = 0; n < 3; n++) {
          const reply = await worker.run(batch, never);
          assert(reply.kind === "answered", JSON.stringify(reply));
          assert.match(reply.outputs[0]!, /"data":\[1.5\]/);
        }
        assert.deepEqual([server.refused, server.asked, server.calls.length], [1, 1, 3]);
        const flawed = await worker.run({ ...batchOf(['["gD8="]']), parameters: bf16 }, never);
        assert(flawed.kind === "rejected");
        assert.match(flawed.message, /BF16, which JSON cannot say/);
      }));
  }

  test("what JSON cannot say is the client's mistake before it was learned, too", () =>
    withServer({ jsonOnly: 500 }, async (worker) => {
      const reply = await worker.run({ ...batchOf(['["gD8="]']), parameters: bf16 }, never);
      assert(reply.kind === "rejected", reply.kind);
      assert.match(reply.message, /BF16, which JSON cannot say/);
    }));

  test("one that lists it is believed: its refusal stands, and no call is made twice", () =>
    withServer({}, async (worker, server) => {
      server.twist = () => ({ status: 500, headers: {}, body: Buffer.from("CUDA error") });
      for (let n = 0; n < 3; n++) {
        const reply = await worker.run(batch, never);
        assert(reply.kind === "failed" && reply.blame === "worker");
      }
      assert.deepEqual([server.asked, server.calls.length], [1, 3]);
    }));

  test("one that answered it a moment ago is not asked", () =>
    withServer({}, async (worker, server) => {
      assert.equal((await worker.run(batch, never)).kind, "answered");
      server.twist = () => ({ status: 400, headers: {}, body: Buffer.from("bad values") });
      assert.equal((await worker.run(batch, never)).kind, "rejected");
      assert.equal(server.asked, 0);
    }));

  test("one that is broken altogether fails, as any other", () =>
    withServer({ broken: true }, async (worker) => {
      const reply = await worker.run(batch, never);
      assert(reply.kind === "failed" && reply.blame === "worker");
    }));
});

describe("http, broken connections:", () => {
  test("a connection lost before the reply blames the batch", () =>
    assertReply(({ socket }) => void socket.destroy(), "failed", /before it answered/, "batch"));

  test("a connection reset in the middle of the reply blames the batch", () =>
    assertReply(
      ({ response, socket }) => {
        response.writeHead(200, { "content-length": "1000" });
        response.write('{"outputs":[1,', () => socket.resetAndDestroy());
      },
      "failed",
      /in the middle of its reply \(connection reset\)/,
      "batch",
    ));

  test("a chunked reply that ends early is no reply", () =>
    assertReply(
      ({ response, socket }) => void response.write('{"outputs":[1,2]}', () => socket.end()),
      "failed",
      /in the middle/,
      "batch",
    ));

  test("a refused connection, an unknown name and a server that is no HTTP server", async () => {
    const gone = await StubWorker.listen();
    const { url } = gone;
    await gone[Symbol.asyncDispose]();
    const talker = createServer((socket) => socket.on("data", () => socket.end("SSH-2.0-OpenSSH\r\n")));
    talker.listen(0, "127.0.0.1");
    await once(talker, "listening");
    const port = (talker.address() as AddressInfo).port;
    const backend = backendFor(url, "http://no-such-host.invalid:9/", `http://127.0.0.1:${port}/`);
    const [refused, unknown, foreign] = await Promise.all(
      backend.workers.map((worker) => worker.run(batchOf(["1"]), never)),
    );
    await backend.stop();
    talker.close();
    assert.deepEqual(refused, {
      kind: "failed",
      message: "cannot connect to the worker: connection refused",
      blame: "nobody",
    });
    assert(unknown!.kind === "failed");
    assert.equal(unknown!.blame, "nobody");
    assert(foreign!.kind === "failed");
    assert.equal(foreign!.message, "worker does not speak HTTP/1.1 at this URL");
  });

  test("a worker that hangs up after its 500 does not fail the next batch", () =>
    withStub(echo, async (worker, stub) => {
      for (let n = 0; n < 20; n++) {
        stub.behave = ({ response, socket }) => {
          response.writeHead(500).end("no");
          // Not before the next batch would be on its way.
          stub.behave = echo;
          setImmediate(() => socket.destroy());
        };
        assert.equal((await worker.run(batchOf(["1"]), never)).kind, "failed");
        assert.equal((await worker.run(batchOf(["2"]), never)).kind, "answered");
      }
    }));

  test("a connection that the worker closes between batches is replaced without a failure", () =>
    withStub(echo, async (worker, stub) => {
      for (let round = 1; round <= 3; round++) {
        const arrival = stub.arrival();
        const batch = batchOf([`${round}`]);
        const running = worker.run(batch, never);
        const { socket } = await arrival;
        assert.deepEqual(outputsOf(batch, await running), [`${round}`]);
        const closed = once(socket, "close");
        socket.end();
        await closed;
        assert.equal(stub.connections, round);
      }
    }));

  test("a worker that comes up later is used", async () => {
    const first = await StubWorker.listen();
    const backend = backendFor(first.url);
    await first[Symbol.asyncDispose]();
    const [worker] = backend.workers;
    assert.equal((await worker!.run(batchOf(["1"]), never)).kind, "failed");
    const server = createServer((socket) => {
      socket.on("data", () => socket.end('HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{"outputs":["late"]}'));
    });
    server.listen(Number(new URL(first.url).port), "127.0.0.1");
    await once(server, "listening");
    const batch = batchOf(["1"]);
    assert.deepEqual(outputsOf(batch, await worker!.run(batch, never)), ['"late"']);
    await backend.stop();
    server.close();
  });
});

describe("http, aborts:", () => {
  test("an abort destroys the connection; the next batch gets a fresh one and its own outputs", () =>
    withStub(hang, async (worker, stub) => {
      for (let round = 1; round <= 5; round++) {
        stub.behave = hang;
        const abort = new AbortController();
        const arrival = stub.arrival();
        const running = worker.run(batchOf([`"old ${round}"`]), abort.signal);
        const old = await arrival;
        const closed = once(old.socket, "close");
        abort.abort();
        assert.deepEqual(await running, { kind: "failed", message: "aborted", blame: "batch" });
        stub.behave = echo;
        const batch = batchOf([`"new ${round}"`]);
        assert.deepEqual(outputsOf(batch, await worker.run(batch, never)), [`"new ${round}"`]);
        await closed;
        old.response.end('{"outputs":["stale"]}');
        assert.equal(stub.connections, round + 1);
      }
    }));

  test("a reply that drips is ended by the abort like one that never starts", () =>
    withStub(
      ({ response }) => void response.writeHead(200).write('{"outputs":['),
      async (worker, stub) => {
        const abort = new AbortController();
        const arrival = stub.arrival();
        const running = worker.run(batchOf(["1"]), abort.signal);
        const { response, socket } = await arrival;
        const closed = once(socket, "close");
        for (let byte = 0; byte < 10; byte++) {
          response.write(" ");
          await turn();
        }
        abort.abort();
        assert.equal((await running).kind, "failed");
        await closed;
      },
    ));
});
