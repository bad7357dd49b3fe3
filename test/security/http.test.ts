/** Items 19 to 24: HTTP that is slow, too much, ambiguous, or meant for somebody else. Raw sockets. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { gzipSync } from "node:zlib";
import { assertError, Ferry } from "../e2e/harness.ts";
import { postHead, postText, type RawAnswer, RawClient } from "../e2e/raw-client.ts";
import { Gate, stubModel, StubWorker } from "../e2e/stub-worker.ts";

const MAX_BODY = 4096;
let stub: StubWorker;
let ferry: Ferry;

before(async () => {
  stub = await StubWorker.listen();
  ferry = await serve();
});
after(async () => {
  await ferry?.[Symbol.asyncDispose]();
  await stub?.[Symbol.asyncDispose]();
});

function serve(more: Readonly<Record<string, number>> = {}): Promise<Ferry> {
  const cache = { scope: "off" };
  const limits = { maxBodyBytes: MAX_BODY, maxConnections: 600, ...more };
  return Ferry.start({ models: [stubModel([stub], { cache, collapse: false })], limits });
}

const BODY = '{"input":"a"}';
const CHUNKED = postHead(undefined, "Transfer-Encoding: chunked");
const SMUGGLED = postText('{"input":"smuggled"}');
const get = (target = "/healthz", ...fields: readonly string[]): string =>
  [`GET ${target} HTTP/1.1`, "Host: localhost", ...fields, "", ""].join("\r\n");

async function exchange(bytes: string | Buffer): Promise<RawAnswer> {
  await using client = await RawClient.connect(ferry.url);
  client.send(bytes);
  return await client.answer();
}

/** One answer of this status and code, then the end of the connection, and nothing behind it. */
async function refusedAndClosed(bytes: string, status = 400, code = "INVALID_REQUEST"): Promise<void> {
  await using client = await RawClient.connect(ferry.url);
  client.send(bytes);
  assertError(await client.answer(), status, code);
  await client.closed();
  assert.equal(client.rest, "");
}

describe("19 slowloris: closed in time, and honest callers do not notice", () => {
  const HEADERS_MS = 500;
  const REQUEST_MS = 1000;
  /** How much later than its timeout a slow client may be answered: the defaults are 10 and 30 s. */
  const SLACK_MS = 8000;
  const slowly = async (bytes: string): Promise<number> => {
    // Of its own: on a busy machine an honest client may be slower than these.
    await using hasty = await serve({ headersTimeoutMs: HEADERS_MS, requestTimeoutMs: REQUEST_MS });
    await using client = await RawClient.connect(hasty.url);
    const start = performance.now();
    client.send(bytes);
    assertError(await client.answer(), 408, "REQUEST_TIMEOUT");
    await client.closed();
    return performance.now() - start;
  };
  test("headers that never end → 408 and closed after headersTimeoutMs", async () => {
    const took = await slowly("POST /v1/inference HTTP/1.1\r\nHost: localhost\r\nX-Slow: ");
    assert.ok(took < HEADERS_MS + SLACK_MS, `${took} ms`);
  });
  test("a Content-Length without its body → 408 and closed after requestTimeoutMs", async () => {
    const took = await slowly(postHead(20) + "{");
    assert.ok(took < REQUEST_MS + SLACK_MS, `${took} ms`);
  });
  test("500 slow clients at once: an honest request is answered", async () => {
    await using own = await serve({ headersTimeoutMs: 5000 });
    const clients = await Promise.all(Array.from({ length: 500 }, () => RawClient.connect(own.url)));
    try {
      for (const client of clients) client.send("POST /v1/inference HTTP/1.1\r\nHo");
      await own.infer("honest");
      await Promise.all(clients.map((client) => client.closed()));
    } finally {
      await Promise.all(clients.map((client) => client[Symbol.asyncDispose]()));
    }
  });
});

describe("20 too large: headers, trailers and chunk extensions are bounded", () => {
  const many = (n: number) => Array.from({ length: n }, (_, i) => `X-${i}: b`);
  test("a header of 20 KB → 431", async () => {
    assertError(await exchange(get("/healthz", `X-A: ${"a".repeat(20_000)}`)), 431, "INVALID_REQUEST");
  });
  test("a query string of 20 KB → 431; of 10 KB it is only ignored", async () => {
    assertError(await exchange(get(`/healthz?${"a".repeat(20_000)}`)), 431, "INVALID_REQUEST");
    assert.equal((await exchange(get(`/healthz?${"a=b&".repeat(2500)}`))).status, 200);
  });
  test("3,000 headers, and 101 → 431", async () => {
    for (const count of [3000, 100]) {
      assertError(await exchange(get("/healthz", ...many(count))), 431, "INVALID_REQUEST");
    }
  });
  test("trailers of 20 KB → 431", async () => {
    const trailer = `${CHUNKED}d\r\n${BODY}\r\n0\r\nX-A: ${"a".repeat(20_000)}\r\n\r\n`;
    assertError(await exchange(trailer), 431, "INVALID_REQUEST");
  });
  test("a chunk extension of 20 KB → refused", async () => {
    const { status } = await exchange(`${CHUNKED}d;x=${"a".repeat(20_000)}\r\n${BODY}\r\n0\r\n\r\n`);
    assert.ok(status === 400 || status === 413, `${status}`);
  });
});

describe("21 smuggling: 400 and close", () => {
  const ambiguous: Readonly<Record<string, string>> = {
    "CL and TE together": `${postHead(5, "Transfer-Encoding: chunked")}0\r\n\r\n${SMUGGLED}`,
    "TE and CL together": `${CHUNKED.replace("Transfer", "Content-Length: 5\r\nTransfer")}0\r\n\r\n${SMUGGLED}`,
    "two CLs": postHead(13, "Content-Length: 14") + BODY + SMUGGLED,
    "the same CL twice": postHead(13, "Content-Length: 13") + BODY + SMUGGLED,
    "CL +13": postHead(undefined, "Content-Length: +13") + BODY + SMUGGLED,
    "CL -13": postHead(undefined, "Content-Length: -13") + BODY + SMUGGLED,
    "TE: xchunked": `${postHead(undefined, "Transfer-Encoding: xchunked")}0\r\n\r\n${SMUGGLED}`,
    "chunked twice": `${postHead(undefined, "Transfer-Encoding: chunked, chunked")}0\r\n\r\n${SMUGGLED}`,
    "two TE lines": `${postHead(undefined, "Transfer-Encoding: chunked", "Transfer-Encoding: x")}0\r\n\r\n`,
    "TE: gzip, chunked": `${postHead(undefined, "Transfer-Encoding: gzip, chunked")}d\r\n${BODY}\r\n0\r\n\r\n${SMUGGLED}`,
    "TE: identity, chunked": `${postHead(undefined, "Transfer-Encoding: identity, chunked")}0\r\n\r\n${SMUGGLED}`,
    "TE: identity": `${postHead(undefined, "Transfer-Encoding: identity")}${SMUGGLED}`,
    "TE: chunked;a=b": `${postHead(undefined, "Transfer-Encoding: chunked;a=b")}0\r\n\r\n${SMUGGLED}`,
    "TE gzip and TE chunked in two lines": `${postHead(undefined, "Transfer-Encoding: gzip", "Transfer-Encoding: chunked")}0\r\n\r\n${SMUGGLED}`,
    "TE in HTTP/1.0": `${CHUNKED.replace("HTTP/1.1", "HTTP/1.0")}d\r\n${BODY}\r\n0\r\n\r\n${SMUGGLED}`,
    "TE and keep-alive in HTTP/1.0": `${CHUNKED.replace("HTTP/1.1", "HTTP/1.0\r\nConnection: keep-alive")}0\r\n\r\n${SMUGGLED}`,
    "TE on a path that is passed through or unknown": `${CHUNKED.replace("/v1/inference", "/v1/other").replace("chunked", "gzip, chunked")}0\r\n\r\n${SMUGGLED}`,
    "TE with a tab": `${postHead(undefined, "Transfer-Encoding:\tchunked, identity")}0\r\n\r\n${SMUGGLED}`,
    "a space before the colon": get("/healthz", "X-A : b") + SMUGGLED,
    "a folded header": get("/healthz", "X-A: b", " c") + SMUGGLED,
    "a bare LF": `GET /healthz HTTP/1.1\nHost: localhost\n\n${SMUGGLED}`,
    "a bare CR": get("/healthz", "X-A: b\rX-B: c") + SMUGGLED,
    "NUL in a header": get("/healthz", "X-A: a\0b") + SMUGGLED,
    "NUL in the target": get("/health\0z") + SMUGGLED,
    "CR in the target": get("/health\rz") + SMUGGLED,
    "no Host": "GET /healthz HTTP/1.1\r\n\r\n" + SMUGGLED,
    "a chunk size with a sign": `${CHUNKED}+d\r\n${BODY}\r\n0\r\n\r\n${SMUGGLED}`,
  };
  for (const [name, bytes] of Object.entries(ambiguous)) {
    test(`21 ${name} → 400 and close`, async () => {
      await refusedAndClosed(bytes);
    });
  }
  test("21 two Hosts → 400 and close", () => refusedAndClosed(get("/healthz", "Host: other")));
  test("nothing that stood behind one of them was run", () => {
    assert.ok(!stub.inputs.includes("smuggled"));
  });

  const once: Readonly<Record<string, readonly [string, string]>> = {
    "Idempotency-Key": ["Idempotency-Key: one", "idempotency-key: two"],
    Authorization: ["Authorization: Bearer a", "Authorization: Bearer b"],
    "x-api-key": ["X-Api-Key: a", "x-api-key: a"],
    "Content-Type": ["Content-Length: 13", "Content-Type: text/plain"],
    "Content-Encoding": ["Content-Encoding: identity", "Content-Encoding: gzip"],
  };
  for (const [name, fields] of Object.entries(once)) {
    test(`21 ${name} twice → 400 and close`, async () => {
      const length = name === "Content-Type" ? undefined : 13;
      await refusedAndClosed(postHead(length, ...fields) + BODY);
    });
  }

  test("21 a malformed request behind one that waits: no answer that could be taken for its own", async () => {
    const gate = new Gate();
    stub.behave = gate.hold;
    try {
      await using client = await RawClient.connect(ferry.url);
      const calls = stub.calls.length;
      client.send(postText('{"input":"waits"}'));
      await stub.call(calls + 1);
      client.send("FERRY /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n");
      await client.closed();
      assert.equal(client.rest, "");
    } finally {
      gate.open();
      stub.behave = (call) => call.echo();
    }
  });

  test("21 HTTP/1.0 with keep-alive: pipelined requests get their answers in order", async () => {
    await using client = await RawClient.connect(ferry.url);
    const old = (text: string): string => text.replace("HTTP/1.1", "HTTP/1.0\r\nConnection: keep-alive");
    client.send(old(postText(BODY)) + old(get("/nothing")) + old(get()));
    const statuses = [];
    for (let i = 0; i < 3; i++) statuses.push((await client.answer()).status);
    assert.deepEqual(statuses, [200, 404, 200]);
  });

  test("21 pipelined requests after an error get their own answers, in order", async () => {
    await using client = await RawClient.connect(ferry.url);
    client.send(postText("{") + get("/nothing") + postText(BODY) + get());
    const statuses = [];
    for (let i = 0; i < 4; i++) statuses.push((await client.answer()).status);
    assert.deepEqual(statuses, [400, 404, 200, 200]);
  });
});

describe("22 methods and targets that are not for us", () => {
  test("CONNECT → closed, no tunnel", async () => {
    await using client = await RawClient.connect(ferry.url);
    client.send("CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: 169.254.169.254:80\r\n\r\n");
    await client.closed();
    assert.match(client.rest, /^$|^HTTP\/1\.1 4/);
  });
  test("TRACE, OPTIONS, PUT and HEAD of a POST route → 405 and Allow", async () => {
    for (const method of ["TRACE", "OPTIONS", "PUT"]) {
      const answer = await exchange(`${method} /v1/inference HTTP/1.1\r\nHost: localhost\r\n\r\n`);
      assertError(answer, 405, "METHOD_NOT_ALLOWED");
      assert.equal(answer.headers["allow"], "POST");
      assert.ok(!answer.text.includes("Host"), "nothing is echoed");
    }
    await using client = await RawClient.connect(ferry.url);
    client.send("HEAD /v1/inference HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    await client.closed();
    assert.match(client.rest, /^HTTP\/1\.1 405 [^]*\r\n\r\n$/, "and no body");
  });
  test("Upgrade → an answer in HTTP/1.1, never 101", async () => {
    for (const protocol of ["websocket", "h2c", "TLS/1.0"]) {
      const answer = await exchange(get("/healthz", "Connection: Upgrade", `Upgrade: ${protocol}`));
      assert.equal(answer.status, 200);
    }
  });
  test("absolute-form: another host's → 404, our own → answered", async () => {
    assertError(await exchange(get("http://169.254.169.254/healthz")), 404, "NOT_FOUND");
    assertError(await exchange(get("http://localhost@169.254.169.254/healthz")), 404, "NOT_FOUND");
    assertError(await exchange(get("http://localhostess/healthz")), 404, "NOT_FOUND");
    assert.equal((await exchange(get("http://localhost/healthz"))).status, 200);
  });
  test("encoded and dotted paths lead nowhere", async () => {
    const targets = ["/v1/../internal/health", "/%2e%2e/internal/health", "/v1%2finference", "//healthz"];
    targets.push("/healthz/", "/healthz%00", "/HEALTHZ", "/v1/result/../../metrics", "/v1/result/__proto__");
    targets.push("/v1/result/", "/constructor", "/%68ealthz", "/healthz;x=1", "/internal/health", "/metrics");
    for (const target of targets) assertError(await exchange(get(target)), 404, "NOT_FOUND");
  });
});

describe("23 a body over the limit → 413 before it is read, and no 100", () => {
  test("announced", () => refusedAndClosed(postHead(MAX_BODY + 1), 413, "PAYLOAD_TOO_LARGE"));
  test("announced beyond what a number holds", () =>
    refusedAndClosed(postHead(undefined, `Content-Length: ${"9".repeat(15)}`), 413, "PAYLOAD_TOO_LARGE"));
  test("chunked: cut at the limit", () =>
    refusedAndClosed(`${CHUNKED}2000\r\n${" ".repeat(0x2000)}\r\n`, 413, "PAYLOAD_TOO_LARGE"));
  test("Expect: 100-continue: no 100 for what is refused, whatever the reason", async () => {
    const expect = "Expect: 100-continue";
    const cases: [head: string, status: number, code: string][] = [
      [postHead(MAX_BODY + 1, expect), 413, "PAYLOAD_TOO_LARGE"],
      [postHead(9, expect).replace("/v1/inference", "/nothing"), 404, "NOT_FOUND"],
      [postHead(9, expect).replace("POST", "PUT"), 405, "METHOD_NOT_ALLOWED"],
      [postHead(9, expect).replace("application/json", "text/plain"), 415, "UNSUPPORTED_MEDIA_TYPE"],
    ];
    for (const [head, status, code] of cases) {
      await using client = await RawClient.connect(ferry.url);
      client.send(head);
      assertError(await client.answer(), status, code);
      await client.closed();
      assert.deepEqual(client.interims, [], code);
    }
  });
  test("Expect: 100-continue: one 100 for what is welcome; any other expectation is 417", async () => {
    await using client = await RawClient.connect(ferry.url);
    client.send(postHead(BODY.length, "Expect: 100-continue"));
    client.send(BODY);
    assert.equal((await client.answer()).status, 200);
    assert.deepEqual(client.interims, [100]);
    assert.equal((await exchange(postText(BODY, "Expect: 200-ok"))).status, 417);
  });
});

describe("24 compressed bodies → 415, never unpacked", () => {
  test("24 gzip, deflate, br, and a bomb of 97 KB → 415", async () => {
    const bomb = gzipSync(Buffer.alloc(4_000_000));
    for (const encoding of ["gzip", "deflate", "br", "zstd", "gzip, identity", "x-gzip"]) {
      const answer = await ferry.post(bomb.subarray(0, 4000), { "content-encoding": encoding });
      assertError(answer, 415, "UNSUPPORTED_MEDIA_TYPE");
    }
    assert.equal((await ferry.health()).queue_depth, 0);
  });
  test("24 Transfer-Encoding: gzip, chunked → refused", async () => {
    const body = gzipSync(Buffer.from(BODY)).toString("latin1");
    const head = postHead(undefined, "Transfer-Encoding: gzip, chunked");
    await refusedAndClosed(`${head}${body.length.toString(16)}\r\n${body}\r\n0\r\n\r\n`);
  });
});
