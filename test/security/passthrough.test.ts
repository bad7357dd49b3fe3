/** What is passed through stays inside: no client chooses the host or leaves the base, no worker splits an answer. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { type IncomingMessage, request } from "node:http";
import { test } from "node:test";
import { type Config, eventually, Ferry, Folder, runFerry, writeConfig } from "../e2e/harness.ts";
import { openModel, OpenWorker, RawWorker } from "../e2e/open-worker.ts";
import { type RawAnswer, RawClient } from "../e2e/raw-client.ts";

async function say(ferry: Ferry, text: string): Promise<RawAnswer> {
  await using client = await RawClient.connect(ferry.url);
  client.send(text);
  return await client.answer();
}

async function keyFor(user: string, folder: Folder, config: Config): Promise<string> {
  await writeConfig(folder, config);
  const file = `${folder.path}/ferry.yaml`;
  const { stdout } = await runFerry(["keys", "create", "--user", user, "--tier", "paid", "-c", file]);
  return stdout.trim();
}

const get = (target: string, ...fields: readonly string[]): string =>
  [`GET ${target} HTTP/1.1`, "Host: localhost", ...fields, "", ""].join("\r\n");

test("paths that could lead out of the worker's base are refused, plain ones are not touched", async () => {
  await using worker = await OpenWorker.listen();
  await using ferry = await Ferry.start({ models: [openModel([`${worker.url}/base/`])] });
  const refused = [
    "/../admin",
    "/x/../../admin",
    "/..",
    "/.",
    "/./x",
    "/x/%2e%2e/%2E%2e/admin",
    "/x/.%2e/admin",
    "/..%2fadmin",
    "/%2e%2e%2f%2e%2e%2fadmin",
    "/..%5cadmin",
    "/..\\admin",
    "/x/..;/admin",
    "/..;a=b/admin",
    "/%252e%252e/admin",
    "/%25252e%25252e%25252fadmin",
    "/%2525252525252e./admin",
    "//evil.example/x",
    "/x%00",
    "/x y",
    "/x%0d%0aHost:%20evil",
    "/models/open/../../admin",
    "/models/open//evil.example",
    "http://evil.example/x",
    "https://evil.example/x",
  ];
  for (const target of refused) {
    const { status } = await say(ferry, get(target));
    assert.ok(status === 400 || status === 404, `${target}: ${status}`);
  }
  assert.deepEqual(worker.calls, []);
  for (const [target, reached] of [
    ["/x/BAAI%2Fbge-small", "/base/x/BAAI%2Fbge-small"],
    ["/a/...", "/base/a/..."],
    ["/a/..b/c..", "/base/a/..b/c.."],
    ["/@evil.example:80/", "/base/@evil.example:80/"],
    ["/a//b", "/base/a//b"],
    ["/a%20b?q=../..&r=%0d%0a", "/base/a%20b?q=../..&r=%0d%0a"],
    ["http://localhost/own", "/base/own"],
  ] as const) {
    const answer = await say(ferry, get(target));
    assert.equal(answer.status, 200, target);
    assert.equal((JSON.parse(answer.text) as { url: string }).url, reached);
  }
});

test("nothing in a request chooses the host, and requests cannot be smuggled", async () => {
  await using worker = await OpenWorker.listen();
  await using ferry = await Ferry.start({ models: [openModel([worker.url])] });
  const host = new URL(worker.url).host;
  const answer = await say(
    ferry,
    get(
      "/x",
      "X-Forwarded-Host: evil",
      "Forwarded: host=evil",
      "X-Host: evil",
      "Connection: close, x-secret, x-forwarded-for",
      "X-Secret: 1",
    ),
  );
  const { headers } = JSON.parse(answer.text) as { headers: string[] };
  assert.equal(headers[headers.indexOf("host") + 1], host);
  assert.equal(headers.filter((name) => name.toLowerCase() === "host").length, 1);
  assert.ok(!headers.includes("x-secret") && !headers.includes("forwarded"));
  assert.equal(headers[headers.indexOf("x-forwarded-for") + 1], "127.0.0.1");
  const before = worker.calls.length;
  for (const fields of [
    ["Content-Length: 5", "Transfer-Encoding: chunked"],
    ["Content-Length: 5", "Content-Length: 6"],
    ["Content-Length: +5"],
    ["Transfer-Encoding: chunked, identity"],
    ["Transfer-Encoding : chunked"],
    ["X: a\rb"],
    ["X: a\nHost: evil"],
    ["Host: evil"],
    ["X: a\x7fb"],
    ["X\x80: a"],
    ["Upgrade: websocket", "Connection: Upgrade"],
    ["Expect: 200-ok"],
    [`X: ${"a".repeat(20_000)}`],
  ]) {
    const { status } = await say(ferry, get("/x", ...fields));
    assert.ok([400, 417, 431].includes(status), `${fields[0]!.slice(0, 40)}: ${status}`);
  }
  assert.equal(worker.calls.length, before, "nothing of that reached the worker");
  const chunked = [
    "POST /x HTTP/1.1",
    "Host: localhost",
    "Transfer-Encoding: chunked",
    "Expect: 100-continue",
  ];
  const body = "5\r\nhello\r\n0\r\n\r\n";
  await using client = await RawClient.connect(ferry.url);
  client.send(`${chunked.join("\r\n")}\r\n\r\n${body}${get("/second")}`);
  const first = JSON.parse((await client.answer()).text) as { body: string; headers: string[] };
  assert.equal(first.body, "hello");
  assert.ok(!first.headers.includes("expect"));
  assert.deepEqual(client.interims, [100]);
  assert.equal((JSON.parse((await client.answer()).text) as { url: string }).url, "/second");
  const old = await say(ferry, "GET /old HTTP/1.0\r\n\r\n");
  assert.equal(old.status, 200);
});

test("a request reaches the model that it was sent to, and no other of the worker's", async () => {
  await using worker = await OpenWorker.listen();
  const models = ["own", "other"].map((name) => ({
    name,
    passthrough: name === "own",
    backend: {
      kind: "http",
      protocol: "ollama",
      workers: [`${worker.url}/${name === "own" ? "" : "api/embed"}`],
      model: `${name}:7b`,
    },
  }));
  await using ferry = await Ferry.start({ models });
  const said = async (path: string, body: string | Buffer, headers = {}): Promise<string> => {
    const { status, text } = await ferry.post(body, headers, path);
    if (status !== 200) return `${status} ${Object.keys(JSON.parse(text) as object).join()}`;
    const { url, body: sent } = JSON.parse(text) as { url: string; body: string };
    return `${url} ${sent}`;
  };
  for (const name of ["other", "other:7b", "own"]) {
    const unload = await said(
      "/models/own/api/embed",
      `{"model":"${name}","MODEL":"${name}","keep_alive":0}`,
    );
    assert.equal(unload, '/api/embed {"model":"own:7b","MODEL":"own:7b","keep_alive":0}');
  }
  for (const base of ["/models/own", ""]) {
    for (const [path, body] of [
      ["/api/generate", '{"model":"other:7b","keep_alive":0}'],
      ["/api/generate", '{"Model":"other:7b"}'],
      ["/api/delete", '{"name":"other:7b"}'],
      ["/api/copy", '{"source":"own","destination":"other:7b"}'],
      ["/v1/models/other:7b", "{}"],
    ] as const)
      assert.equal(await said(base + path, body), "404 error", base + path);
    const types = { "content-type": "application/octet-stream" };
    assert.equal(await said(`${base}/api/generate`, '  {"model":"other:7b"}', types), "404 error");
    assert.equal(await said(`${base}/api/generate`, '{"model":"own"} {"model":"other:7b"}'), "400 error");
    const utf16 = Buffer.from('\ufeff{"model":"other:7b"}', "utf16le");
    assert.equal(await said(`${base}/api/generate`, utf16, types), "400 error");
    assert.equal(await said(`${base}/api/generate`, "{}", { "content-encoding": "gzip" }), "415 error");
    assert.equal(await said(`${base}/api/chat`, '{"model":"own"}'), '/api/chat {"model":"own:7b"}');
    assert.equal(await said(`${base}/api/blobs/x`, "bytes"), "/api/blobs/x bytes");
  }
  assert.equal(await said("/models/own", '{"a":1}'), '/ {"a":1}');
  for (const path of ["/models/other", "/models/unknown", "/models/unknown/x", "/models//own"])
    assert.match(await said(path, '{"secret":1}'), /^404 /);
});

test("a body that comes in pieces is read, or passed on, from its first byte", async () => {
  await using worker = await OpenWorker.listen();
  await using ferry = await Ferry.start({ models: [openModel([worker.url])] });
  for (const body of ['  {"model":"open","a":"e"}', "x".repeat(200_000), "\n \r\n", "no JSON"]) {
    await using client = await RawClient.connect(ferry.url);
    client.send(`POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: ${Buffer.byteLength(body)}\r\n\r\n`);
    for (let at = 0; at < body.length; at += Math.ceil(body.length / 7)) {
      client.send(body.slice(at, at + Math.ceil(body.length / 7)));
      await new Promise((resolve) => setImmediate(resolve));
    }
    const { text } = await client.answer();
    assert.equal((JSON.parse(text) as { body: string }).body, body);
  }
});

/** What a hostile worker says, and the status that the client gets. */
const HOSTILE: readonly (readonly [what: string, bytes: string, status: number])[] = [
  ["no HTTP at all", "hello\r\n\r\n", 502],
  ["a line break in a header", "HTTP/1.1 200 OK\r\nX: a\rSet-Cookie: b\r\nContent-Length: 0\r\n\r\n", 502],
  ["two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\naa", 502],
  [
    "a length and chunks",
    "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    502,
  ],
  ["a NUL", "HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 0\r\n\r\n", 502],
  ["a switch of protocols", "HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", 502],
  [
    "a header without an end",
    `HTTP/1.1 200 OK\r\nX: ${"a".repeat(40_000)}\r\nContent-Length: 0\r\n\r\n`,
    502,
  ],
  [
    "hints first",
    "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    200,
  ],
  ["204 with a body", "HTTP/1.1 204 No\r\nContent-Length: 2\r\n\r\nok", 204],
  [
    "a second answer",
    "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
    200,
  ],
  [
    "trailers",
    "HTTP/1.1 200 OK\r\nTrailer: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX: evil\r\n\r\n",
    200,
  ],
  [
    "headers of its own connection",
    "HTTP/1.1 200 OK\r\nConnection: keep-alive, x-hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=9\r\nSet-Cookie: a=b\r\n" +
      "Alt-Svc: h2=evil\r\nContent-Length: 2\r\n\r\nok",
    200,
  ],
];

test("a hostile worker can spoil its own answer at most", async () => {
  await using worker = await RawWorker.listen("");
  await using ferry = await Ferry.start({ models: [openModel([worker.url])] });
  for (const [what, bytes, status] of HOSTILE) {
    worker.answer = bytes;
    await using client = await RawClient.connect(ferry.url);
    client.send(get("/x"));
    const answer = await client.answer();
    assert.equal(answer.status, status, `${what}: ${answer.text}`);
    if (status === 200) assert.equal(answer.text, "ok", what);
    const names = Object.keys(answer.headers);
    for (const gone of ["set-cookie", "x-hop", "alt-svc", "trailer", "link", "x"]) {
      assert.ok(!names.includes(gone), `${what}: ${gone}`);
    }
    assert.equal(client.rest, "", what);
    // The next request, on the same connection or another, gets its own answer.
    worker.answer = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnext";
    assert.equal((await say(ferry, get("/next"))).text, "next", what);
  }
});

test("a worker that promises more than it sends leaves nobody with a whole answer", async () => {
  await using worker = await RawWorker.listen("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf");
  worker.hangsUp = true;
  await using ferry = await Ferry.start({ models: [openModel([worker.url])] });
  await using client = await RawClient.connect(ferry.url);
  client.send(get("/x"));
  await client.closed();
  assert.match(client.rest, /content-length: 10\r\n[^]*\r\n\r\nhalf$/);
});

test("strangers do not reach a worker; those who are known leave their key behind, and are counted", async () => {
  await using worker = await OpenWorker.listen();
  await using folder = await Folder.make();
  const config = {
    models: [openModel([worker.url])],
    limits: { perUserPerMinute: 3 },
    auth: { mode: "required", keysFile: "./keys.json" },
  };
  const key = await keyFor("a", folder, config);
  await using ferry = await Ferry.start(config, folder);
  assert.equal((await ferry.post("{}", {}, "/x")).status, 401);
  assert.equal((await ferry.post("{}", { "x-api-key": "wrong" }, "/models/open/x")).status, 401);
  assert.equal(worker.calls.length, 0);
  const answers = [];
  for (let n = 0; n < 4; n++) answers.push(await ferry.post("{}", { authorization: `Bearer ${key}` }, "/x"));
  const statuses = answers.map(({ status }) => status);
  assert.deepEqual(statuses, [200, 200, 200, 429]);
  assert.equal(answers[0]!.header("ratelimit-remaining"), "2");
  for (const { request } of worker.calls) assert.ok(!request.rawHeaders.join("\n").includes(key));
  assert.ok(!ferry.stderr().includes(key));
});

test("one user cannot take all places for what is passed through", async () => {
  await using worker = await OpenWorker.listen(({ response }) => void response.writeHead(200).write("begun"));
  await using folder = await Folder.make();
  const config = {
    models: [openModel([worker.url])],
    limits: { maxPassthrough: 4 },
    auth: { mode: "required", keysFile: "./keys.json" },
  };
  const [greedy, other] = [await keyFor("greedy", folder, config), await keyFor("other", folder, config)];
  await using ferry = await Ferry.start(config, folder);
  const streams: IncomingMessage[] = [];
  /** The status of a stream that then stays open. */
  const open = async (key: string): Promise<number> => {
    const asked = request(`${ferry.url}/x`, { headers: { "x-api-key": key }, agent: false }).end();
    const [answer] = (await once(asked, "response")) as [IncomingMessage];
    streams.push(answer.on("error", () => {}));
    return answer.statusCode!;
  };
  const statuses = [];
  for (const key of [greedy, greedy, greedy, other, other, greedy, other]) statuses.push(await open(key));
  assert.deepEqual(statuses, [200, 200, 429, 200, 429, 429, 429]);
  // What one gives back is for whoever holds fewer.
  streams[0]!.destroy();
  await eventually(async () => (await open(other)) === 200);
  assert.equal(await open(greedy), 429);
  for (const stream of streams) stream.destroy();
});

test("a client that leaves while it uploads ends the worker's request", async () => {
  await using worker = await OpenWorker.listen(async ({ body }) => void (await body()));
  await using ferry = await Ferry.start({ models: [openModel([worker.url])] });
  const arrival = worker.arrival();
  const client = await RawClient.connect(ferry.url);
  client.send("POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nsome");
  const { request } = await arrival;
  const cut = once(request, "close");
  await client[Symbol.asyncDispose]();
  await cut.catch(() => {});
  assert.equal(request.complete, false);
});
