/** What no batch is for goes to a worker as it came, and the answer comes back as it is made. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { request as httpRequest, type IncomingMessage } from "node:http";
import { test } from "node:test";
import { gunzipSync, gzipSync } from "node:zlib";
import { eventually, Ferry } from "./harness.ts";
import { openModel, OpenWorker } from "./open-worker.ts";

interface Told {
  readonly method: string;
  readonly url: string;
  readonly headers: readonly string[];
  readonly body: string;
}

function told(text: string): Told & { header(name: string): string | undefined } {
  const said = JSON.parse(text) as Told;
  const at = (name: string): number => said.headers.findIndex((each) => each.toLowerCase() === name);
  return { ...said, header: (name) => (at(name) < 0 ? undefined : said.headers[at(name) + 1]) };
}

/** A request whose answer can be read piece by piece. */
async function open(url: string, method = "GET", body?: string): Promise<IncomingMessage> {
  const request = httpRequest(url, { method, agent: false });
  request.on("error", () => {});
  request.end(body);
  const [answer] = (await once(request, "response")) as [IncomingMessage];
  answer.on("error", () => {});
  return answer;
}

/** Resolves when it is closed, by whatever error; `once` would reject. */
function closed(answer: IncomingMessage): Promise<void> {
  return new Promise((resolve) => void answer.once("close", resolve));
}

async function next(answer: IncomingMessage): Promise<string> {
  const [chunk] = (await once(answer, "data")) as [Buffer];
  return chunk.toString("utf8");
}

test("method, path, query, body and type reach the worker; Ferry's own headers do not", async () => {
  await using worker = await OpenWorker.listen();
  const backend = { authorization: "Bearer worker-key" };
  await using ferry = await Ferry.start({
    models: [openModel([`${worker.url}/base/v1/embeddings`], { backend })],
  });
  const headers = {
    authorization: "Bearer of-the-client",
    "x-api-key": "of-the-client",
    cookie: "a=b",
    "x-forwarded-for": "10.1.1.1",
    "x-forwarded-host": "evil.example",
    te: "trailers",
    "x-mine": "café".normalize("NFC").slice(0, 3),
    traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
  };
  const answer = await ferry.post('{"messages":[]}', headers, "/v1/chat/completions?x=%20y&z");
  assert.equal(answer.status, 200, answer.text);
  const said = told(answer.text);
  assert.deepEqual(
    [said.method, said.url, said.body],
    ["POST", "/base/v1/chat/completions?x=%20y&z", '{"messages":[]}'],
  );
  assert.equal(said.header("authorization"), "Bearer worker-key");
  assert.equal(said.header("content-type"), "application/json");
  assert.equal(said.header("content-length"), "15");
  assert.equal(said.header("host"), new URL(worker.url).host);
  assert.equal(said.header("x-mine"), "caf");
  assert.equal(said.header("x-forwarded-for"), "10.1.1.1, 127.0.0.1");
  assert.equal(said.header("traceparent"), headers.traceparent);
  for (const gone of ["cookie", "x-api-key", "x-forwarded-host", "te"])
    assert.equal(said.header(gone), undefined, gone);
  assert.doesNotMatch(answer.text, /of-the-client/);
  assert.match(answer.header("x-request-id"), /^[0-9A-Z]{36}$/);

  for (const method of ["PUT", "PATCH", "DELETE", "OPTIONS"] as const) {
    const other = await open(`${ferry.url}/models/open/anything`, method);
    assert.equal(told(await next(other)).method, method);
  }
  const direct = await ferry.get("/models/open/v1/unknown");
  assert.equal(told(direct.text).url, "/base/v1/unknown");
  assert.equal(told(direct.text).header("content-length"), undefined);
});

test("HEAD, 204 and 304 have no body; gzip goes through untouched; a redirect is not followed", async () => {
  const zipped = gzipSync("hello");
  await using worker = await OpenWorker.listen(({ request, response }) => {
    if (request.url === "/none") response.writeHead(204, { "x-a": "1" }).end();
    else if (request.url === "/same") response.writeHead(304, { etag: '"1"' }).end();
    else if (request.url === "/moved") response.writeHead(302, { location: "/elsewhere" }).end();
    else response.writeHead(200, { "content-encoding": "gzip", "content-length": zipped.length }).end(zipped);
  });
  await using ferry = await Ferry.start({ models: [openModel([worker.url])] });
  const head = await open(`${ferry.url}/x`, "HEAD");
  assert.deepEqual([head.statusCode, head.headers["content-length"]], [200, String(zipped.length)]);
  assert.equal((await open(`${ferry.url}/none`)).statusCode, 204);
  assert.equal((await open(`${ferry.url}/same`)).headers.etag, '"1"');
  const moved = await open(`${ferry.url}/moved`);
  assert.deepEqual([moved.statusCode, moved.headers.location], [302, "/elsewhere"]);
  const answer = await open(`${ferry.url}/x`);
  assert.equal(answer.headers["content-encoding"], "gzip");
  const chunks: Buffer[] = [];
  for await (const chunk of answer) chunks.push(chunk as Buffer);
  assert.equal(gunzipSync(Buffer.concat(chunks)).toString(), "hello");
});

test("events arrive one by one; a client that leaves ends the worker's stream", async () => {
  await using worker = await OpenWorker.listen(({ response }) => {
    response.writeHead(200, { "content-type": "text/event-stream" });
    response.flushHeaders();
  });
  await using ferry = await Ferry.start({ models: [openModel([worker.url])] });
  const arrival = worker.arrival();
  const answer = await open(`${ferry.url}/v1/chat/completions`, "POST", '{"stream":true}');
  const { response, closed } = await arrival;
  assert.equal(answer.headers["content-type"], "text/event-stream");
  for (const event of ["data: 1\n\n", "data: 2\n\n", "data: [DONE]\n\n"]) {
    response.write(event);
    assert.equal(await next(answer), event);
  }
  answer.destroy();
  await closed;
});

test("a worker that dies in mid-stream ends the client's connection without an end", async () => {
  await using worker = await OpenWorker.listen(({ response }) => {
    response.writeHead(200).write("half");
  });
  await using ferry = await Ferry.start({ models: [openModel([worker.url])] });
  const arrival = worker.arrival();
  const answer = await open(`${ferry.url}/long`);
  assert.equal(await next(answer), "half");
  const broken = closed(answer);
  (await arrival).response.destroy();
  await broken;
  assert.equal(answer.complete, false);
  await eventually(async () => {
    const { text } = await ferry.admin("/metrics");
    return /_requests_total\{[^}]*model="open"[^}]*\} 1\n/.test(text);
  });
});

test("a slow reader slows the worker; an upload is streamed, and bounded", async () => {
  let written = 0;
  const chunk = Buffer.alloc(64 * 1024, "a");
  await using worker = await OpenWorker.listen(async ({ request, response, body }) => {
    if (request.method === "POST") return void response.end(String((await body()).length));
    const pour = (): void => {
      while (written < 200 * chunk.length && (written += chunk.length) > 0 && response.write(chunk));
      if (written >= 200 * chunk.length) response.end();
    };
    response.on("drain", pour);
    pour();
  });
  const limits = { maxBodyBytes: 3_000_000 };
  await using ferry = await Ferry.start({ models: [openModel([worker.url])], limits });
  const answer = await open(`${ferry.url}/pour`);
  answer.pause();
  let before = -1;
  await eventually(() => {
    const still = written === before;
    before = written;
    return still;
  });
  assert.ok(written < 200 * chunk.length, `${written} bytes were taken from the worker for nobody`);
  let read = 0;
  for await (const piece of answer) read += (piece as Buffer).length;
  assert.equal(read, 200 * chunk.length);
  const whole = await ferry.post("a".repeat(2_500_000), {}, "/upload");
  assert.equal(whole.text, "2500000");
  const announced = await ferry.post("a".repeat(3_000_001), {}, "/upload");
  assert.equal(announced.status, 413);
  const upload = httpRequest(`${ferry.url}/upload`, { method: "POST", agent: false });
  upload.on("error", () => {});
  const refused = once(upload, "response") as Promise<[IncomingMessage]>;
  for (let sent = 0; sent < 3_200_000; sent += chunk.length) upload.write(chunk);
  assert.equal((await refused)[0].statusCode, 413);
  upload.destroy();
});

test("a worker that cannot be reached is passed over; with none it is 503 in the protocol's shape", async () => {
  await using one = await OpenWorker.listen(({ response }) => void response.end("one"));
  await using two = await OpenWorker.listen(({ response }) => void response.end("two"));
  await using ferry = await Ferry.start({ models: [openModel([one.url, two.url])] });
  const seen = new Set<string>();
  for (let n = 0; n < 4; n++) seen.add((await ferry.post("{}", {}, "/x")).text);
  assert.deepEqual([...seen].sort(), ["one", "two"]);
  await one.close();
  two.behave = async ({ response, body }) => void response.end(`two ${await body()}`);
  // Read as a whole, or a stream of which the beginning was looked at.
  for (const body of ["text", "{}", "x".repeat(200_000)])
    assert.equal((await ferry.post(body, {}, "/x")).text, `two ${body}`);
  await two.close();
  const nobody = await ferry.post("{}", {}, "/x");
  assert.equal(nobody.status, 503);
  assert.equal(nobody.header("retry-after"), "1");
  assert.equal((JSON.parse(nobody.text) as { error: { type: string } }).error.type, "server_error");
  await one.open();
  assert.equal((await ferry.post("{}", {}, "/x")).text, "one");
});

test("too many at once are refused, silence is cut off, and a drain waits for streams", async () => {
  await using worker = await OpenWorker.listen(({ request, response }) => {
    if (request.url !== "/silent") response.writeHead(200).write("begun");
  });
  // What is not silent is faster than these on any machine.
  const limits = { maxPassthrough: 1, passthroughIdleMs: 8000, drainMs: 40_000 };
  const timeouts = { queueMs: 5000, workerMs: 5000, totalMs: 6000 };
  await using ferry = await Ferry.start({ models: [openModel([worker.url], { timeouts })], limits });
  assert.equal((await ferry.get("/silent")).status, 504);
  const idle = await open(`${ferry.url}/stream`);
  const over = closed(idle);
  idle.resume();
  const full = await ferry.get("/stream");
  assert.equal(full.status, 503);
  await over;
  assert.equal(idle.complete, false);

  const arrival = worker.arrival();
  const last = await open(`${ferry.url}/stream`);
  const { response } = await arrival;
  const stopped = ferry.stop();
  await ferry.line(({ msg }) => /drain|stop/i.test(msg ?? ""));
  response.end(" and ended");
  let text = "";
  for await (const piece of last) text += String(piece);
  assert.equal(text, "begun and ended");
  assert.equal((await stopped).code, 0);
});
