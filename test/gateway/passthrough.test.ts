/** What is passed on, as the routes decide it and as its headers and path are checked. */
import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { Refusal } from "../../src/core/errors.ts";
import type { Crossing } from "../../src/gateway/crossing.ts";
import { DropIns, type DropInModel, type Passage } from "../../src/gateway/dropin.ts";
import type { Exchange } from "../../src/gateway/exchange.ts";
import { checkPath, sentBack, sentOn } from "../../src/gateway/pass-headers.ts";
import type { Protocol } from "../../src/protocol/protocol.ts";

/** Never batches: everything it knows is for a worker. */
const streamer = {
  name: "openai-completions",
  client: {
    infer: [
      { path: "/v1/stream", read: () => ({ unbatched: true, model: "ours" }) },
      {
        path: "/v2/models/{model}/versions/{version}/infer",
        read: () => ({ unbatched: true, model: "ours" }),
      },
    ],
    about: [
      { path: "/v2/models/{model}/ready", open: true, tell: () => "worker" },
      { path: "/info", tell: () => "worker", fallback: () => ({ body: '"ours"' }) },
    ],
    fail: () => ({ body: "{}" }),
  },
} as unknown as Protocol;

interface Seen extends Partial<Passage> {
  readonly sent?: string;
}

/** Asks a route, and says what went to the proxy, or what was answered. */
async function ask(
  method: "GET" | "POST",
  path: string,
  more: Partial<DropInModel>,
  body = "{}",
): Promise<Seen> {
  let seen: Seen = {};
  const crossing = {
    enter: () => Promise.resolve({ tenant: "a", tier: 0 }),
    pass: (caller: unknown) => Promise.resolve(caller === undefined ? [] : ["ratelimit", "1"]),
  } as unknown as Crossing;
  const proxy = {
    forward: (_: Exchange, passage: Passage) => {
      seen = passage;
      return Promise.resolve();
    },
  };
  const model = {
    name: "ours",
    protocols: [streamer],
    passthrough: true,
    maxBatchSize: 64,
    reachable: true,
    ready: () => true,
  };
  const parts = {
    crossing,
    proxy,
    limits: { maxInputs: 2048, maxBytes: Infinity },
    ready: () => true,
    version: "",
  };
  const dropIns = new DropIns([{ ...model, ...more }], parts);
  const exchange = {
    query: "",
    bytes: () => Promise.resolve(Buffer.from(body)),
    header: () => undefined,
    send: (_: number, sent: string) => (seen = { sent }),
  } as unknown as Exchange;
  const methods = dropIns.routes()[path] ?? dropIns.find(path)!.methods;
  await methods[method]!(exchange, "");
  return seen;
}

test("what cannot share a batch goes to a worker with the name that it knows", async () => {
  const body = '{"a":1.50,"model":"ours","b":{"model":"ours"}}';
  const as = await ask("POST", "/v1/stream", {}, body);
  assert.deepEqual([as.path, String(as.body)], ["/v1/stream", body]);
  assert.deepEqual(as.headers, ["ratelimit", "1"]);
  const renamed = await ask("POST", "/v1/stream", { workerName: 'the/"irs"' }, body);
  assert.equal(String(renamed.body), '{"a":1.50,"model":"the/\\"irs\\"","b":{"model":"ours"}}');
  const path = "/v2/models/ours/versions/1%202/infer";
  assert.equal((await ask("POST", path, {})).path, path);
  const named = await ask("POST", path, { workerName: "a/b" });
  assert.equal(named.path, "/v2/models/a%2Fb/versions/1%202/infer");
  const pinned = await ask("GET", "/models/ours/v2/models/ours/ready", { workerName: "theirs" });
  assert.deepEqual([pinned.path, pinned.caller, pinned.headers], ["/v2/models/theirs/ready", undefined, []]);
  assert.equal((await ask("POST", "/models/ours/v9/unknown", { workerName: "theirs" })).path, "/v9/unknown");
});

test("without workers that can be asked, Ferry answers itself or says why not", async () => {
  assert.equal((await ask("GET", "/info", { reachable: false })).sent, '"ours"');
  await assert.rejects(ask("POST", "/v1/stream", { reachable: false }), /answers in batches only/);
  await assert.rejects(ask("GET", "/v2/models/ours/ready", { reachable: false }), { code: "NOT_FOUND" });
});

test("headers of one connection stay on it, in whatever case, and what Connection lists", () => {
  const raw = ["Connection", "X-A , keep-alive", "x-a", "1", "X-B", "2", "TE", "trailers", ":path", "/"];
  assert.deepEqual(sentOn([...raw, "Cookie", "c", "X-C", "mine"], ["x-c", "ours"]), [
    "x-b",
    "2",
    "x-c",
    "ours",
  ]);
  assert.deepEqual(sentBack([...raw, "Set-Cookie", "c", "Content-Length", "5"], true), ["x-b", "2"]);
  assert.deepEqual(sentBack(["Content-Length", "5", "Vary", "a", "Vary", "b"], false), [
    "content-length",
    "5",
    "vary",
    "a",
    "vary",
    "b",
  ]);
});

test("a header that a WSGI server would read as one that is not sent on is not sent on either", () => {
  const raw = [
    "content_length",
    "99",
    "X_Api-Key",
    "k",
    "Authorization",
    "a",
    "x_forwarded_for",
    "1",
    "x_b",
    "2",
  ];
  assert.deepEqual(sentOn(raw, ["x-forwarded-for", "9"]), ["x_b", "2", "x-forwarded-for", "9"]);
});

test("no request has a #", () => {
  for (const [path, query] of [
    ["/x#y", ""],
    ["/x", "a#b"],
  ] as const)
    assert.throws(() => checkPath(path, query), Refusal);
});

test("whatever is accepted as a path stays below the base, however often it is decoded", () => {
  const part = fc.constantFrom(..."/.\\;%ab".split(""), "..", "%2e", "%2E", "%2f", "%5c", "%25", "%00", "x");
  fc.assert(
    fc.property(fc.array(part, { maxLength: 12 }), (parts) => {
      const path = `/${parts.join("")}`;
      try {
        checkPath(path);
      } catch (error) {
        return error instanceof Refusal;
      }
      let form = path;
      for (let round = 0; round < 10; round++) {
        const { pathname, host } = new URL(`http://worker/base${form}`);
        if (host !== "worker" || !pathname.startsWith("/base")) return false;
        if (form.split(/[/\\]/).some((segment) => /^\.\.(;|$)/.test(segment))) return false;
        form = form.replace(/%([0-9a-f]{2})/gi, (_, hex: string) => String.fromCharCode(parseInt(hex, 16)));
      }
      return true;
    }),
    { numRuns: 5000 },
  );
});
