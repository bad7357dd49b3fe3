/** What the gateway refuses about HTTP itself: malformed, ambiguous, too much, too slow, wrong method. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { assertError, Ferry } from "./harness.ts";
import { postHead, postText, RawClient, type RawAnswer } from "./raw-client.ts";
import { Gate, stubModel, StubWorker } from "./stub-worker.ts";

let stub: StubWorker;
let ferry: Ferry;

before(async () => {
  stub = await StubWorker.listen();
  ferry = await Ferry.start({ models: [stubModel([stub])] });
});
after(async () => {
  await ferry?.[Symbol.asyncDispose]();
  await stub?.[Symbol.asyncDispose]();
});

/** Sends these bytes on a connection of their own; the one answer. */
async function exchange(bytes: string): Promise<RawAnswer> {
  await using client = await RawClient.connect(ferry.url);
  client.send(bytes);
  return await client.answer();
}

const get = (...fields: readonly string[]): string =>
  ["GET /healthz HTTP/1.1", "Host: localhost", ...fields, "", ""].join("\r\n");

const CHUNKED = postHead(undefined, "Transfer-Encoding: chunked");
const BODY = '{"input":"a"}';
const SMUGGLED = "GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n";

describe("400 and closed: HTTP that two readers could read differently", () => {
  const requests: Readonly<Record<string, string>> = {
    "two Host headers": get("Host: other"),
    "the same Host twice": get("Host: localhost"),
    "no Host": "GET /healthz HTTP/1.1\r\n\r\n",
    "Content-Length and Transfer-Encoding":
      postHead(5, "Transfer-Encoding: chunked") + "0\r\n\r\n" + SMUGGLED,
    "Transfer-Encoding and Content-Length":
      CHUNKED.replace("Trans", "Content-Length: 5\r\nTrans") + "0\r\n\r\n",
    "two Content-Lengths": postHead(13, "Content-Length: 14") + BODY + SMUGGLED,
    "the same Content-Length twice": postHead(13, "Content-Length: 13") + BODY,
    "a list of Content-Lengths": postHead(undefined, "Content-Length: 13, 13") + BODY,
    "a Content-Length with a plus": postHead(undefined, "Content-Length: +13") + BODY,
    "a negative Content-Length": postHead(undefined, "Content-Length: -13") + BODY,
    "a hex Content-Length": postHead(undefined, "Content-Length: 0xd") + BODY,
    "an unknown Transfer-Encoding": `${postHead(undefined, "Transfer-Encoding: xchunked")}0\r\n\r\n`,
    "chunked twice": `${postHead(undefined, "Transfer-Encoding: chunked, chunked")}0\r\n\r\n`,
    "chunked not last": `${postHead(undefined, "Transfer-Encoding: chunked, identity")}0\r\n\r\n`,
    "a chunk size with a sign": `${CHUNKED}+d\r\n${BODY}\r\n0\r\n\r\n`,
    "a chunk size of 2^64": `${CHUNKED}1000000000000000d\r\n${BODY}`,
    "a space before the colon": get("X-A : b"),
    "a folded header": get("X-A: b", " folded"),
    "bare line feeds": "GET /healthz HTTP/1.1\nHost: localhost\n\n",
    "one bare line feed": "GET /healthz HTTP/1.1\r\nHost: localhost\nX-A: b\r\n\r\n",
    "a bare carriage return": get("X-A: b\rX-B: c"),
    "NUL in a header": get("X-A: a\0b"),
    "NUL in the path": "GET /health\0z HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "ESC in a header": get("X-A: \u001b[31m"),
    "a header without a colon": get("X-A"),
    "a header without a name": get(": b"),
    "a space in the path": "GET /health z HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "an unknown protocol": "GET /healthz HTTQ/1.1\r\nHost: localhost\r\n\r\n",
    "HTTP/2 in clear": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS on a plain port": "\u0016\u0003\u0001\u0002\u0000\u0001\u0000\u0001\u00fc\u0003\u0003",
    "an unknown method": "FERRY /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
  };
  for (const [name, bytes] of Object.entries(requests)) {
    test(name, async () => {
      await using client = await RawClient.connect(ferry.url);
      client.send(bytes);
      assertError(await client.answer(), 400, "INVALID_REQUEST");
      await client.closed();
      assert.equal(client.rest, "", "one answer and no more: nothing was smuggled");
    });
  }
});

describe("too much of it", () => {
  const many = (n: number) => Array.from({ length: n }, (_, i) => `X-${i}: b`);

  test("a header of 20 KB is 431", async () => {
    assertTooLarge(await exchange(get(`X-A: ${"a".repeat(20_000)}`)));
  });
  test("3,000 headers are 431", async () => {
    assertTooLarge(await exchange(get(...many(3000))));
  });
  test("100 headers pass, 101 are 431 and the message says so", async () => {
    assert.equal((await exchange(get(...many(99)))).status, 200);
    assert.match(assertTooLarge(await exchange(get(...many(100)))), /100/);
  });
  test("a path of 20 KB is refused", async () => {
    const { status } = await exchange(`GET /${"a".repeat(20_000)} HTTP/1.1\r\nHost: localhost\r\n\r\n`);
    assert.ok([404, 414, 431].includes(status), `${status}`);
  });
  test("chunk extensions and trailers of 20 KB are refused", async () => {
    const extension = await exchange(`${CHUNKED}d;x=${"a".repeat(20_000)}\r\n${BODY}\r\n0\r\n\r\n`);
    assert.ok([400, 413].includes(extension.status), `${extension.status}`);
    const trailer = await exchange(`${CHUNKED}d\r\n${BODY}\r\n0\r\nX-A: ${"a".repeat(20_000)}\r\n\r\n`);
    assert.ok([400, 431].includes(trailer.status), `${trailer.status}`);
  });
});

describe("408 REQUEST_TIMEOUT", () => {
  const HEADERS_MS = 600;
  const REQUEST_MS = 1200;
  /** How much later than its timeout a slow client may be answered: the defaults are 10 and 30 s. */
  const SLACK_MS = 8000;
  /** With short times, of its own: on a busy machine an honest client may be slower than these. */
  let hasty: Ferry;

  before(async () => {
    const limits = { headersTimeoutMs: HEADERS_MS, requestTimeoutMs: REQUEST_MS };
    hasty = await Ferry.start({ models: [stubModel([stub])], limits });
  });
  after(() => hasty?.[Symbol.asyncDispose]());

  /** Sends a byte now and then until it is answered; how long that took. */
  async function drip(head: string, bytes: string): Promise<number> {
    await using client = await RawClient.connect(hasty.url);
    const start = performance.now();
    client.send(head);
    let sent = 0;
    const timer = setInterval(() => client.send(bytes[sent++ % bytes.length]!), 100);
    try {
      assertError(await client.answer(), 408, "REQUEST_TIMEOUT");
      await client.closed();
    } finally {
      clearInterval(timer);
    }
    return performance.now() - start;
  }

  test("slow headers, in time", async () => {
    const took = await drip("POST /v1/inference HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", "a");
    assert.ok(took >= HEADERS_MS && took < HEADERS_MS + SLACK_MS, `${took} ms`);
  });
  test("a slow body, in time", async () => {
    const took = await drip(postHead(1000), " ");
    assert.ok(took >= REQUEST_MS && took < REQUEST_MS + SLACK_MS, `${took} ms`);
  });
  test("a slow chunked body, in time", async () => {
    const took = await drip(postHead(undefined, "Transfer-Encoding: chunked"), "1\r\n \r\n");
    assert.ok(took >= REQUEST_MS && took < REQUEST_MS + SLACK_MS, `${took} ms`);
  });
  test("200 slow clients do not hold up an honest one", async () => {
    await using own = await Ferry.start({ models: [stubModel([stub])], limits: { headersTimeoutMs: 5000 } });
    const slow = await Promise.all(Array.from({ length: 200 }, () => RawClient.connect(own.url)));
    try {
      for (const client of slow) client.send("POST /v1/inference HTTP/1.1\r\nHost: f");
      await own.infer("honest");
      await Promise.all(slow.map((client) => client.closed()));
    } finally {
      await Promise.all(slow.map((client) => client[Symbol.asyncDispose]()));
    }
  });
  test("waiting for a worker is not being slow", async () => {
    const gate = new Gate();
    stub.behave = gate.hold;
    const calls = stub.calls.length;
    await using client = await RawClient.connect(hasty.url);
    client.send(postText('{"input":"held longer than requestTimeoutMs"}'));
    await stub.call(calls + 1);
    // Node looks for slow clients once a second.
    const timer = setTimeout(() => gate.open(), REQUEST_MS + 1500);
    const answer = await client.answer();
    clearTimeout(timer);
    assert.equal(answer.status, 200, answer.text);
  });
});

describe("methods and targets", () => {
  test("405 says what is allowed", async () => {
    const wrong = [
      ["PUT", "/v1/inference", "POST"],
      ["GET", "/v1/inference", "POST"],
      ["TRACE", "/v1/inference", "POST"],
      ["OPTIONS", "/v1/inference", "POST"],
      ["PATCH", "/api/inference", "POST"],
      ["POST", "/v1/result/abc", "GET"],
      ["DELETE", "/healthz", "GET"],
      ["POST", "/openapi.json", "GET"],
    ];
    for (const [method, path, allowed = ""] of wrong) {
      const answer = await exchange(
        `${method} ${path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n`,
      );
      assertError(answer, 405, "METHOD_NOT_ALLOWED");
      assert.ok(answer.headers["allow"]?.split(/, */).includes(allowed), `${method} ${path}`);
    }
  });

  test("HEAD of a page that can be read has no body", async () => {
    await using client = await RawClient.connect(ferry.url);
    client.send("HEAD /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    await client.closed();
    assert.match(client.rest, /^HTTP\/1\.1 (200|405) /);
    assert.ok(client.rest.endsWith("\r\n\r\n"), client.rest);
  });

  test("CONNECT opens no tunnel", async () => {
    await using client = await RawClient.connect(ferry.url);
    client.send("CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: 169.254.169.254:80\r\n\r\n");
    await client.closed();
    assert.match(client.rest, /^$|^HTTP\/1\.1 4\d\d /);
  });

  test("an upgrade is not taken", async () => {
    const answer = await exchange(get("Connection: Upgrade", "Upgrade: websocket"));
    assert.notEqual(answer.status, 101);
  });

  test("Ferry is nobody's proxy: an absolute target on another host is refused", async () => {
    const answer = await exchange("GET http://169.254.169.254/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert.ok(answer.status >= 400 && answer.status < 500, `${answer.status}`);
  });

  test("OPTIONS * and paths with dots are no way around", async () => {
    for (const target of [
      "*",
      "/v1/../internal/health",
      "/%2e%2e/internal/health",
      "/v1/result/../../metrics",
    ]) {
      const answer = await exchange(`GET ${target} HTTP/1.1\r\nHost: localhost\r\n\r\n`);
      assert.ok([400, 404].includes(answer.status), `${target}: ${answer.status} ${answer.text}`);
    }
  });

  test("an expectation that is not 100-continue is 417, in the one shape of errors", async () => {
    const answer = await exchange(postText(BODY, "Expect: miracles"));
    assert.equal(answer.status, 417);
    assertShape(answer);
  });
});

describe("one connection, many requests", () => {
  test("pipelined requests are answered in order", async () => {
    await using client = await RawClient.connect(ferry.url);
    // The first waits for its batch; the others are known at once, and still come after it.
    stub.behave = (call) => void setTimeout(() => call.echo(), 50);
    const bodies = [{ input: "slow" }, { wrong: 1 }, { input: "slow" }, {}].map((body) =>
      JSON.stringify(body),
    );
    client.send(bodies.map((body) => postText(body)).join("") + get());
    const statuses: number[] = [];
    for (let i = 0; i < 5; i++) statuses.push((await client.answer()).status);
    assert.deepEqual(statuses, [200, 400, 200, 400, 200]);
  });

  test("errors whose body was read leave the connection usable", async () => {
    await using client = await RawClient.connect(ferry.url);
    const wrong = ["{", '{"input":1e400}', '{"input":"a","model":"nobody"}', "[]"];
    for (const body of wrong) {
      client.send(postText(body));
      assertError(await client.answer(), 400, "INVALID_REQUEST");
    }
    client.send(postText('{"input":"after errors"}'));
    assert.equal((await client.answer()).status, 200);
    assert.ok(!client.isClosed);
  });

  test("so do errors of requests that have no body", async () => {
    await using client = await RawClient.connect(ferry.url);
    for (const path of ["/v1/result/unknown", "/nothing", "/v1/inference"]) {
      client.send(`GET ${path} HTTP/1.1\r\nHost: localhost\r\n\r\n`);
      assert.ok([404, 405].includes((await client.answer()).status));
    }
    client.send(get());
    assert.equal((await client.answer()).status, 200);
  });

  test("Connection: close and HTTP/1.0 are obeyed", async () => {
    for (const bytes of [get("Connection: close"), "GET /healthz HTTP/1.0\r\n\r\n"]) {
      await using client = await RawClient.connect(ferry.url);
      client.send(bytes);
      assert.equal((await client.answer()).status, 200);
      await client.closed();
    }
  });
});

function assertTooLarge(answer: RawAnswer): string {
  assert.equal(answer.status, 431, answer.text);
  return assertShape(answer);
}

/** The shape of an error whose code SPEC does not list; its message. */
function assertShape(answer: RawAnswer): string {
  const code = (JSON.parse(answer.text) as { error: string }).error;
  assert.match(code, /^[A-Z_]+$/);
  return assertError(answer, answer.status, code).message!;
}
