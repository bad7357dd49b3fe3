/** What is passed on, as the routes decide it and as its headers and path are checked. */
import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { Refusal } from "../../src/core/errors.ts";
import type { RequestPath } from "../../src/gateway/request-path.ts";
import { DropIns, type DropInModel, type Passage } from "../../src/gateway/dropin.ts";
import type { Exchange } from "../../src/gateway/exchange.ts";
import { checkPath, sentBack, sentOn } from "../../src/gateway/passthrough.ts";
import type { Protocol } from "../../src/gateway/protocol/protocol.ts";

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

const model = {
  name: "ours",
  protocols: [streamer],
  passthrough: true,
  maxBatchSize: 64,
  reachable: true,
  ready: () => true,
};

/** Asks a route, and says what went to the proxy, or what was answered. */
async function ask(
  method: "GET" | "POST",
  target: string,
  more: Partial<DropInModel>,
  body = "{}",
  others: readonly DropInModel[] = [],
): Promise<Seen> {
  let seen: Seen = {};
  const requestPath = {
    identify: () => Promise.resolve({ tenant: "a", tier: 0 }),
    admit: () => Promise.resolve({ tenant: "a", tier: 0 }),
    pass: (caller: unknown) => Promise.resolve(caller === undefined ? [] : ["ratelimit", "1"]),
  } as unknown as RequestPath;
  const proxy = {
    forward: (_: Exchange, passage: Passage) => {
      seen = passage;
      return Promise.resolve();
    },
  };
  const limits = { maxInputs: 2048, maxBytes: Infinity };
  const parts = { path: requestPath, proxy, limits, ready: () => true, version: "" };
  const dropIns = new DropIns([{ ...model, ...more }, ...others], parts);
  const [path = "", query = ""] = target.split("?");
  const exchange = {
    query,
    hasBody: method === "POST",
    objectBody: () => Promise.resolve(body.startsWith("{") ? Buffer.from(body) : undefined),
    bytes: () => Promise.resolve(Buffer.from(body)),
    header: () => undefined,
    send: (_: number, sent: string) => (seen = { sent }),
  } as unknown as Exchange;
  const methods = dropIns.routes()[path] ?? dropIns.find(path)?.methods;
  if (methods === undefined) throw new Refusal("NOT_FOUND", "no route");
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

test("the name in an unbatched body is that of the worker, whatever the client wrote and in whatever case", async () => {
  const body = '{"model":"other","MODEL":"other","keep_alive":0,"x":{"model":"other"}}';
  for (const [more, name] of [
    [{}, "ours"],
    [{ workerName: "theirs" }, "theirs"],
  ] as const) {
    const { body: sent } = await ask("POST", "/models/ours/v1/stream", more, body);
    assert.equal(String(sent), `{"model":"${name}","MODEL":"${name}","keep_alive":0,"x":{"model":"other"}}`);
  }
  for (const [without, rest] of [
    ["{}", "}"],
    [' { "a":1}', ', "a":1}'],
  ] as const) {
    const { body: sent } = await ask("POST", "/models/ours/v1/stream", { workerName: "theirs" }, without);
    assert.equal(String(sent), `{"model":"theirs"${rest}`);
  }
  const path = "/models/ours/v2/models/other/versions/1/infer";
  assert.equal((await ask("POST", path, {})).path, "/v2/models/ours/versions/1/infer");
  assert.equal((await ask("GET", "/models/ours/v2/models/other/ready", {})).path, "/v2/models/ours/ready");
});

test("beneath /models/NAME, and beside other models, nothing that is passed on names another model", async () => {
  const theirs = { workerName: "org/theirs" };
  const beside = [{ ...model, name: "other", passthrough: false }];
  for (const [base, others] of [
    ["/models/ours", []],
    ["", beside],
  ] as const) {
    const pass = (target: string, body?: string): Promise<Seen> =>
      ask("POST", base + target, theirs, body, others);
    const refused: readonly (readonly [target: string, body?: string])[] = [
      ["/api/generate", '{"model":"other","keep_alive":0}'],
      ["/api/generate", '{"model":"ours","Model":"other"}'],
      ["/api/generate", '{"model":["other"]}'],
      ["/api/generate", '{"model":"ours"}{"model":"other"}'],
      ["/api/generate", '{"model":"ours","model":"other"}'],
      ["/v9/models/other"],
      ["/v9/models//other/infer"],
      ["/v9/Models/%6fther:predict"],
      ["/v9%2fmodels/other/infer"],
      ["/v9/models%2Fother%2finfer"],
      ["/v2/repository/models/other/unload"],
      ["/chat?x=1&model=other"],
      ["/chat?%6dodel=other"],
      ["/chat?MODEL=%6fther"],
    ];
    for (const [target, body] of refused) {
      const how = await pass(target, body).then(
        () => "passed on",
        (error: Refusal) => error.status,
      );
      assert.ok(how === 404 || how === 400, `${base}${target} ${body}: ${how}`);
    }
    const own = await pass("/v9/models/ours:predict?model=ours&y=%20", '{"a":1,"model":"ours"}');
    assert.deepEqual(
      [own.path, own.query, String(own.body)],
      ["/v9/models/org%2Ftheirs:predict", "model=org%2Ftheirs&y=%20", '{"a":1,"model":"org/theirs"}'],
    );
    for (const name of ["org/theirs", "org%2Ftheirs", "org/theirs/x"])
      assert.match((await pass(`/v9/models/${name}`)).path!, /^\/v9\/models\/org(?:\/|%2F)theirs(?:\/x)?$/);
    assert.equal(
      String((await pass("/x", '{"model":"org/theirs:latest"}')).body),
      '{"model":"org/theirs:latest"}',
    );
    assert.equal((await pass("/upload", "not JSON")).body, undefined, "streamed");
  }
  const ollama = { protocols: [{ ...streamer, name: "ollama" } as Protocol] };
  for (const body of ['{"name":"other"}', '{"source":"ours","destination":"other"}', '{"Name":"other"}'])
    await assert.rejects(ask("POST", "/models/ours/api/delete", ollama, body), { status: 404 });
});

test("the only model of a config takes any name at the root; its own is replaced", async () => {
  const theirs = { workerName: "theirs" };
  for (const body of ['{"model":"other"}', '{"model":"ours"} x', '{"model":7}'])
    assert.equal(String((await ask("POST", "/v9/chat", theirs, body)).body), body);
  assert.equal(
    String((await ask("POST", "/v9/chat", theirs, '{"model":"ours"}')).body),
    '{"model":"theirs"}',
  );
  assert.equal((await ask("POST", "/v9/models/other?model=other", theirs)).path, "/v9/models/other");
});

test("/models/NAME is that model's root, and nothing below /models/ is another model's", async () => {
  const root = {
    ...streamer,
    client: { ...streamer.client, infer: [{ path: "/", read: () => ({ unbatched: true }) }] },
  } as unknown as Protocol;
  const closed = { ...model, name: "closed", passthrough: false, protocols: [root] };
  for (const path of ["/models/closed", "/models/closed/"]) {
    const seen = await ask("POST", path, {}, "{}", [closed]);
    assert.deepEqual([seen.model, seen.path], ["closed", "/"]);
  }
  assert.deepEqual((await ask("POST", "/models/ours", {})).path, "/");
  for (const path of [
    "/models/unknown",
    "/models/unknown/x",
    "/models//ours",
    "/models/",
    "/models/Ours",
    "/models/..%2fours",
  ])
    await assert.rejects(ask("POST", path, {}), { status: 404 }, path);
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

test("what only a worker's own proxy may say is not sent on, nor any name that WSGI could read as such", () => {
  const claims = `
    X-Forwarded X-Forwarded-Host X-Forwarded-Prefix X-Forwarded-Uri X-Forwarded-User
    X-Forwarded-Client-Cert X-Forward-For Forwarded X-Original-Url X-Original-Host X-Rewrite-Url
    X-HTTP-Method-Override X-HTTP-Method X-Method-Override X-Host Proxy X-Real-IP True-Client-IP
    CF-Connecting-IP CF-Connecting-IPv6 X-Client-IP Client-IP X-Cluster-Client-IP Fastly-Client-IP
    Fly-Client-IP X-Azure-ClientIP X-Azure-SocketIP X-Originating-IP X-Remote-Addr Remote-User
    X-Envoy-Original-Path X-Auth-Request-User X-Goog-Authenticated-User-Email X-Ms-Client-Principal
    X-SSL-Client-Cert X-Url-Scheme content_length X_Api-Key Authorization x_forwarded_for
    X_Original_Url x_b _
  `;
  const mine = [
    "x-request-id",
    "x-client-name",
    "x-stainless-os",
    "openai-organization",
    "anthropic-version",
  ];
  const others = ["accept", "content-type", "content-encoding", "inference-header-content-length", "x-clip"];
  const raw = [...claims.trim().split(/\s+/), ...mine, ...others].flatMap((name) => [name, "1"]);
  const sent = sentOn(raw, ["x-forwarded-for", "9"]);
  assert.deepEqual(sent, [...[...mine, ...others].flatMap((name) => [name, "1"]), "x-forwarded-for", "9"]);
});

test("a worker gives no orders to a proxy before Ferry, and none about its origin to a browser", () => {
  const raw = ["X-Accel-Redirect", "X-Sendfile", "Clear-Site-Data", "Set-Cookie", "Report-To", "Connection"];
  assert.deepEqual(sentBack([...raw.flatMap((name) => [name, "1"]), "X-Accel-Buffering", "no"], false), [
    "x-accel-buffering",
    "no",
  ]);
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
