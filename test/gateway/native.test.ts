import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import type { Admission } from "../../src/gateway/admission/admission.ts";
import { Credentials } from "../../src/gateway/admission/credentials.ts";
import { Refusal } from "../../src/core/errors.ts";
import type { Engine, PutReply } from "../../src/engine/engine.ts";
import type { Exchange } from "../../src/gateway/exchange.ts";
import { looksLikeId, newId } from "../../src/engine/ids.ts";
import { NativeProtocol, parseBody, preferredWaitMs } from "../../src/gateway/native.ts";
import { type ModelRoute, RequestPath } from "../../src/gateway/request-path.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { Waiters } from "../../src/gateway/waiters.ts";

function refusal(body: string): string {
  try {
    parseBody(body);
  } catch (error) {
    assert.ok(error instanceof Refusal && error.code === "INVALID_REQUEST", String(error));
    return error.message;
  }
  throw new Error("it was accepted");
}

describe("a body", () => {
  test("gives its input as the very characters it came in", () => {
    fc.assert(
      fc.property(fc.json({ noUnicodeString: false }), (input) => {
        fc.pre(!input.includes("__proto__") && !/\\u[dD][89a-fA-F]/.test(input));
        assert.equal(parseBody(`{ "input" : ${input} }`).inputs[0], input.trim());
      }),
    );
  });

  test("any text at all is a draft or a refusal, never a crash", () => {
    fc.assert(
      fc.property(
        fc.oneof(
          fc.string(),
          fc.json(),
          fc.string({ unit: fc.constantFrom("{", "}", '"', ":", ",", "a", "1", "\\") }),
        ),
        (body) => {
          try {
            parseBody(body);
          } catch (error) {
            assert.ok(error instanceof Refusal);
          }
        },
      ),
      { numRuns: 2000 },
    );
  });

  test("empty parameters are none; others are made canonical", () => {
    assert.equal(parseBody('{"input":1,"parameters":{ }}').parameters, "");
    assert.equal(parseBody('{"input":1,"parameters":{"b":1, "a":2}}').parameters, '{"a":2,"b":1}');
  });

  test("is refused with a reason", () => {
    assert.match(refusal("[1]"), /send an object/);
    assert.match(refusal("{}"), /"input" is missing/);
    assert.match(refusal('{"input":1,"tier":"enterprise"}'), /unknown field "tier"/);
    assert.match(refusal('{"input":1,"parameters":[]}'), /"parameters" must be an object/);
    assert.match(refusal('{"input":1,"model":7}'), /"model" must be a string/);
    assert.match(refusal('{"input":1,"model":"a\\u0007"}'), /control character/);
    assert.match(refusal('{"input":1,"client_id":""}'), /1 to 255 characters/);
    assert.match(refusal('{"input":1'), /not valid JSON/);
  });
});

describe("Prefer", () => {
  const cases: [string | undefined, number | undefined][] = [
    [undefined, undefined],
    ["respond-async", 0],
    ["Respond-Async", 0],
    ["wait=2", 2000],
    ["wait=0", 0],
    ['wait="1.5"', 1500],
    ["respond-async, wait=10", 10_000],
    ["return=minimal; x=y, respond-async; foo", 0],
    ["wait=soon", undefined],
    ["wait=-1", undefined],
    ["", undefined],
  ];
  for (const [prefer, waitMs] of cases) {
    test(`${prefer ?? "(none)"} → ${waitMs ?? "until it is done"}`, () => {
      assert.equal(preferredWaitMs(prefer, "sync"), waitMs);
    });
  }

  test("api.defaultMode async: not at all, unless the caller says how long", () => {
    assert.equal(preferredWaitMs(undefined, "async"), 0);
    assert.equal(preferredWaitMs("wait=3", "async"), 3000);
  });
});

describe("ids", () => {
  test("sort by time, never repeat, and are recognised", () => {
    const ids = Array.from({ length: 2000 }, (_, at) => newId(1_700_000_000_000 + at));
    assert.deepEqual(ids, ids.toSorted());
    assert.equal(new Set(ids).size, ids.length);
    assert.ok(ids.every(looksLikeId));
    assert.ok(!looksLikeId("../../etc/passwd") && !looksLikeId(ids[0]!.toLowerCase()));
  });
});

test("a long poll leaves no waiter behind: the engine is away, or the caller leaves", async () => {
  const clock = new VirtualClock();
  const away = new Refusal("SERVICE_OVERLOADED", "Redis does not answer; ask again");
  let follow: Engine["follow"] = () => Promise.reject(away);
  const engine = {
    watch: () => () => {},
    follow: (id: string, tenant: string) => follow(id, tenant),
    outcome: () => Promise.reject(away),
  } as unknown as Engine;
  const waiters = new Waiters(engine, clock);
  const tiers = [{ name: "first" }];
  const credentials = new Credentials({ tiers, anonymousTier: "first" }, {});
  const admission = { tierName: () => "first", turn: () => undefined } as unknown as Admission;
  const shared = { admission, waiters, engine, clock };
  const protocol = new NativeProtocol(
    { defaultMode: "sync", maxPollMs: 1000 },
    {
      ...shared,
      path: new RequestPath({ ...shared, put: () => assert.fail(), routes: [], credentials, durable: false }),
      authRequired: false,
    },
  );
  const get = protocol.routes()["/v1/result/{id}"]!["GET"]!;
  const poll = (onGone: Exchange["onGone"]): Promise<void> => {
    const exchange = { query: "wait=1", header: () => undefined, onGone, startedAt: clock.now() };
    return get(exchange as unknown as Exchange, newId(0)) as Promise<void>;
  };
  for (let n = 0; n < 50; n++)
    await assert.rejects(
      poll(() => {}),
      away,
    );
  assert.equal(waiters.size, 0);
  follow = () => Promise.resolve({ state: "queued" } as Awaited<ReturnType<Engine["follow"]>>);
  await assert.rejects(
    poll((gone) => gone()),
    away,
  );
  assert.equal(waiters.size, 0);
});

test("a client that leaves while its task is put is promised nothing, also when the outcome is known at once", async () => {
  const abandoned: string[] = [];
  const engine = {
    watch: () => () => {},
    cancel: async (id: string, tenant: string, left?: boolean) => {
      assert.deepEqual([tenant, left], ["ann", true]);
      abandoned.push(id);
      return "kept";
    },
  } as unknown as Engine;
  const clock = new VirtualClock();
  const caller = { tenant: "ann", tier: 0 };
  const record = { outcome: { ok: true, output: "1" } };
  const waiters = new Waiters(engine, clock);
  const admission = {
    tierName: () => "first",
    turn: () => undefined,
    count: () => undefined,
  } as unknown as Admission;
  const credentials = { identify: () => caller } as unknown as Credentials;
  const route = { name: "m", totalMs: 1000, cache: { scope: "off" }, collapse: false, open: true };
  const routes = [route as unknown as ModelRoute];
  const shared = { admission, waiters, engine, clock };
  const put = () => ({ kind: "done", id: "t1", record, cached: true }) as unknown as PutReply;
  const protocol = new NativeProtocol(
    { defaultMode: "sync", maxPollMs: 1000 },
    {
      ...shared,
      path: new RequestPath({ ...shared, put, routes, credentials, durable: true }),
      authRequired: true,
    },
  );
  for (const path of ["/v1/inference", "/api/inference"] as const) {
    const body = '{"input":"a"}';
    const exchange = {
      answered: true,
      header: () => undefined,
      withBody: (use: (text: string) => void) => use(body),
      onGone: (gone: () => void) => gone(),
    };
    await protocol.routes()[path]!["POST"]!(exchange as unknown as Exchange, "");
  }
  assert.deepEqual(abandoned, ["t1", "t1"]);
});
