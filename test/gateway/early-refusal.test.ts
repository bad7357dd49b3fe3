/** Refusals that are written before `node:http` has made a response: what is refused so, and what goes the usual way. */
import assert from "node:assert/strict";
import { afterEach, beforeEach, describe, test } from "node:test";
import { Admission } from "../../src/gateway/admission/admission.ts";
import { Credentials } from "../../src/gateway/admission/credentials.ts";
import type { Bottleneck, ProcessLoad } from "../../src/gateway/admission/process-load.ts";
import { SystemClock } from "../../src/app/clock.ts";
import type { Engine } from "../../src/engine/engine.ts";
import { EarlyRefusals } from "../../src/gateway/early-refusal.ts";
import type { Exchange } from "../../src/gateway/exchange.ts";
import { bringsWork, Listener } from "../../src/gateway/server.ts";
import { type AnsweredRequest, Events } from "../../src/observe/events.ts";
import { RawClient, type RawAnswer } from "../e2e/raw-client.ts";
import { LIMITS } from "./edge.ts";

const KEEP_ALIVE_MS = 300;

/** A process that is as full as a test says. */
class FakeLoad implements Pick<ProcessLoad, "refuses" | "refused" | "refusing"> {
  bottleneck: Bottleneck | undefined = "turn";
  count = 0;

  get refusing(): boolean {
    return this.bottleneck !== undefined;
  }

  refuses(): Bottleneck | undefined {
    return this.bottleneck;
  }

  refused(): void {
    this.count++;
  }
}

describe("early refusals", () => {
  let load: FakeLoad;
  let listener: Listener;
  let client: RawClient;
  let events: Events;
  let answered: AnsweredRequest[];
  /** Requests that went the usual way. */
  let usual: Exchange[];
  let held: Exchange[];

  beforeEach(async () => {
    load = new FakeLoad();
    events = new Events();
    answered = [];
    usual = [];
    held = [];
    events.on("request.answered", (request) => void answered.push({ ...request, status: request.status }));
    const clock = new SystemClock();
    const tiers = [{ name: "only" }];
    const rules = { tiers, onlyModel: "m" };
    const admission = new Admission(() => rules, {} as Engine, clock, events, load as unknown as ProcessLoad);
    const credentials = new Credentials({ tiers, anonymousTier: "only" });
    const early = new EarlyRefusals({
      admission,
      clock,
      events,
      credentials: () => credentials,
    });
    const take = (exchange: Exchange): void => {
      usual.push(exchange);
      void exchange.body().then((text) => exchange.send(200, JSON.stringify(text)));
    };
    const shape = (): { status: number; body: string } => ({
      status: 529,
      body: '{"detail":"voll: Übermaß"}',
    });
    const routes = {
      "/work": { POST: bringsWork(take) },
      "/shaped": { POST: bringsWork(take, shape) },
      "/other": { POST: take, GET: (exchange: Exchange): void => exchange.send(200, "{}") },
      "/held": { GET: (exchange: Exchange): void => void held.push(exchange) },
    };
    const limits = { ...LIMITS, keepAliveTimeoutMs: KEEP_ALIVE_MS, maxBodyBytes: 1_000_000 };
    listener = new Listener(routes, limits, clock, events, { early });
    client = await RawClient.connect(await listener.listen("127.0.0.1", 0));
  });
  afterEach(async () => {
    await client[Symbol.asyncDispose]();
    listener.close();
  });

  function post(path: string, body = '"a"', ...fields: readonly string[]): string {
    const head = [`POST ${path} HTTP/1.1`, "Host: here", "Content-Type: application/json"];
    return [...head, `Content-Length: ${body.length}`, ...fields, "", body].join("\r\n");
  }

  async function ask(text: string): Promise<RawAnswer> {
    client.send(text);
    return client.answer();
  }

  test("a request for work is refused in Ferry's shape, counted, and its connection goes on", async () => {
    const first = await ask(post("/work"));
    assert.equal(first.status, 503);
    const {
      error,
      message,
      request_id: id,
      retry_after_ms: ms,
    } = JSON.parse(first.text) as Record<string, unknown>;
    assert.equal(error, "SERVICE_OVERLOADED");
    assert.match(
      String(message),
      /more requests than it can handle: tier only is refused .* try again in 1\.1 s$/,
    );
    assert.equal(first.headers["retry-after-ms"], String(ms));
    assert.equal(first.headers["retry-after"], "2");
    const second = await ask(post("/work"));
    assert.notEqual((JSON.parse(second.text) as { request_id: string }).request_id, id);
    assert.equal(load.count, 2);
    assert.deepEqual(
      answered.map(({ id, route, model, tier, status, code }) => ({
        id,
        route,
        model,
        tier,
        status,
        code,
      }))[0],
      { id, route: "/work", model: "m", tier: "only", status: 503, code: "SERVICE_OVERLOADED" },
    );
    load.bottleneck = undefined;
    assert.equal((await ask(post("/work", '"served"'))).text, JSON.stringify('"served"'));
  });

  test("what cannot be stored is told so", async () => {
    load.bottleneck = "put";
    const { text } = await ask(post("/work"));
    assert.match(text, /cannot store tasks as fast as they come: tier only is refused/);
  });

  test("in the shape of the route's protocol, byte by byte", async () => {
    const { status, text, headers } = await ask(post("/shaped"));
    assert.deepEqual([status, text], [529, '{"detail":"voll: Übermaß"}']);
    assert.match(headers["x-request-id"]!, /^[0-9A-Z]{36}$/);
    assert.equal(answered[0]!.status, 529);
  });

  test("the body of a refused request is thrown away, however it comes", async () => {
    const text = post("/work", JSON.stringify("a".repeat(60_000)));
    client.send(text.slice(0, 200));
    assert.equal((await client.answer()).status, 503);
    client.send(text.slice(200, 30_000));
    client.send(text.slice(30_000));
    load.bottleneck = undefined;
    assert.equal((await ask(post("/work", '"next"'))).text, JSON.stringify('"next"'));
  });

  test("what is not plain goes the usual way", async () => {
    const chunked = ["POST /work HTTP/1.1", "Host: here", "Content-Type: application/json"];
    const requests = [
      [...chunked, "Transfer-Encoding: chunked", "", '3\r\n"a"\r\n0\r\nTrailer-Of: it\r\n\r\n'].join("\r\n"),
      post("/work", '"a"', "Expect: 100-continue"),
      post("/work", JSON.stringify("a".repeat(70_000))),
      post("/work?query"),
      post("/other"),
    ];
    for (const [at, text] of requests.entries()) {
      assert.equal((await ask(text)).status, 200, text.slice(0, 100));
      assert.equal(usual.length, at + 1);
    }
    assert.equal((await ask("GET /other HTTP/1.1\r\nHost: here\r\n\r\n")).status, 200);
    assert.equal((await ask(post("/work").replace("Host: here\r\n", ""))).status, 400);
  });

  test("a client that asks for the end of its connection gets it", async () => {
    assert.equal((await ask(post("/work", '"a"', "Connection: close"))).status, 200);
    await client.closed();
  });

  test("behind an unanswered request it waits for its turn on the connection", async () => {
    client.send(`GET /held HTTP/1.1\r\nHost: here\r\n\r\n${post("/work")}`);
    while (usual.length === 0) await new Promise(setImmediate);
    held[0]!.send(200, '"first"');
    assert.equal((await client.answer()).text, '"first"');
    assert.equal((await client.answer()).status, 200);
    assert.equal((await ask(post("/work"))).status, 503, "now it is alone");
  });

  test("a connection that was only refused ends when it is idle, and not while it is answered", async () => {
    assert.equal((await ask(post("/work"))).status, 503);
    client.send("GET /held HTTP/1.1\r\nHost: here\r\n\r\n");
    while (held.length === 0) await new Promise(setImmediate);
    const longer = new SystemClock();
    await new Promise<void>((rang) => longer.at(longer.now() + 2 * KEEP_ALIVE_MS, rang));
    held[0]!.send(200, '"late"');
    assert.equal((await client.answer()).text, '"late"');
    assert.equal((await ask(post("/work"))).status, 503);
    await client.closed();
  });
});
