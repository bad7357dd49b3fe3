/** Keys in Redis, on virtual time: what is asked when, and what happens while nobody answers. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { KeyRedis } from "../../../src/gateway/admission/key-redis.ts";
import { writeRecord } from "../../../src/gateway/admission/api-keys.ts";
import { VirtualClock } from "../../../src/cli/plan/virtual-clock.ts";
import { Events } from "../../../src/observe/events.ts";
import { codeOf, makeKey, notices } from "./stage.ts";

const RELOAD_MS = 5000;
const GRACE_MS = 60_000;

/** The commands that are used, on one hash and one string. */
class FakeRedis {
  readonly hash = new Map<string, string>();
  readonly sent: (readonly unknown[])[] = [];
  secret: string | undefined;
  away = false;
  /** Set: replies wait for it. */
  gate: Promise<void> | undefined;
  replicas = 1;

  primaries() {
    return [{ address: "a:1", replicas: 1, waits: true, up: true }];
  }

  async command(_: number, words: readonly unknown[]) {
    this.sent.push(words);
    await this.gate;
    if (this.away) throw new Error("redis a:1 is not reachable");
    return this.#answer(words.map(String));
  }

  asked(name: string): number {
    return this.sent.filter(([word]) => word === name).length;
  }

  #answer([name = "", , ...args]: readonly string[]) {
    const bytes = (text: string | undefined) => (text === undefined ? null : Buffer.from(text));
    const [field = "", value = ""] = args;
    switch (name) {
      case "HMGET":
        return args.map((each) => bytes(this.hash.get(each)));
      case "HSETNX":
        if (this.hash.has(field)) return 0;
        this.hash.set(field, value);
        return 1;
      case "HDEL":
        return this.hash.delete(field) ? 1 : 0;
      case "HGETALL":
        return [...this.hash].flatMap((pair) => pair.map(bytes));
      case "GET":
        return bytes(this.secret);
      case "SET":
        this.secret ??= field;
        return bytes("OK");
      case "WAIT":
        return this.replicas;
      default:
        throw new Error(`unknown ${name}`);
    }
  }
}

class Stage {
  readonly clock = new VirtualClock();
  readonly events = new Events();
  readonly notices = notices(this.events);
  readonly redis = new FakeRedis();
  readonly made = makeKey("u1", "paid");
  readonly keys = new KeyRedis(
    this.redis,
    { reloadMs: RELOAD_MS, graceMs: GRACE_MS, waitMs: 200, key: (name) => `ferry:{f0h}:${name}` },
    this.clock,
    this.events,
  );

  constructor() {
    this.redis.hash.set(this.id, JSON.stringify(writeRecord(this.made.record)));
  }

  get id(): string {
    return this.made.record.id;
  }

  later(ms: number): Promise<number> {
    return this.clock.run(this.clock.now() + ms);
  }
}

describe("a key that is looked up", () => {
  test("is then known, at once, as the same object", async () => {
    const stage = new Stage();
    const first = await stage.keys.get(stage.id);
    assert.deepEqual(first, stage.made.record);
    assert.equal(stage.keys.get(stage.id), first);
    assert.deepEqual(stage.redis.sent, [["HMGET", "ferry:{f0h}:keys", stage.id]]);
  });

  test("in use it is looked up again beside its requests, which never wait", async () => {
    const stage = new Stage();
    const first = await stage.keys.get(stage.id);
    for (let second = 0; second < 60; second++) {
      await stage.later(1000);
      assert.equal(stage.keys.get(stage.id), first);
    }
    const asked = stage.redis.asked("HMGET");
    assert.ok(asked > 12 && asked <= 21, String(asked));
  });

  test("revoked, it stops working within reloadMs, used or not in between", async () => {
    for (const used of [true, false]) {
      const stage = new Stage();
      await stage.keys.get(stage.id);
      assert.equal(await stage.keys.revoke(stage.id), true);
      for (let ms = 0; ms < RELOAD_MS; ms += 100) {
        await stage.later(100);
        if (used) await stage.keys.get(stage.id);
      }
      assert.equal(await stage.keys.get(stage.id), undefined);
    }
  });
});

describe("an id that nobody has", () => {
  test("is asked for once a second", async () => {
    const stage = new Stage();
    for (let i = 0; i < 100; i++) assert.equal(await stage.keys.get("nobodynobody"), undefined);
    assert.equal(stage.redis.sent.length, 1);
    await stage.later(1000);
    await stage.keys.get("nobodynobody");
    assert.equal(stage.redis.sent.length, 2);
  });

  test("a new key works a second after somebody tried it too early", async () => {
    const stage = new Stage();
    const { record } = makeKey("u2", "free");
    assert.equal(await stage.keys.get(record.id), undefined);
    await stage.keys.add(record);
    await stage.later(1000);
    assert.deepEqual(await stage.keys.get(record.id), record);
  });

  test("guessed by the thousand: one command at a time, and no more in wait than a bound", async () => {
    const stage = new Stage();
    const { promise, resolve } = Promise.withResolvers<void>();
    stage.redis.gate = promise;
    const codes = Array.from({ length: 3000 }, (_, at) => codeOf(() => stage.keys.get(`guess ${at}`)));
    assert.equal(stage.redis.sent.length, 1);
    resolve();
    const told = Map.groupBy(await Promise.all(codes), (code) => code);
    assert.equal(stage.redis.sent.length, 2);
    assert.deepEqual([told.get("none")!.length, told.get("SERVICE_OVERLOADED")!.length], [1001, 1999]);
  });
});

test("a flood of guesses does not keep a revoked key alive", async () => {
  const stage = new Stage();
  await stage.keys.get(stage.id);
  await stage.keys.revoke(stage.id);
  await stage.later(RELOAD_MS);
  const { promise, resolve } = Promise.withResolvers<void>();
  stage.redis.gate = promise;
  const guesses = Array.from({ length: 3000 }, (_, at) => codeOf(() => stage.keys.get(`guess ${at}`)));
  const revoked = stage.keys.get(stage.id);
  resolve();
  assert.equal(await revoked, undefined);
  await Promise.all(guesses);
});

describe("while Redis is away", () => {
  test("a known key works for graceMs, another one is 503; both are said once", async () => {
    const stage = new Stage();
    const first = await stage.keys.get(stage.id);
    stage.redis.away = true;
    await stage.later(RELOAD_MS + 1);
    assert.equal(await stage.keys.get(stage.id), first);
    assert.equal(await codeOf(() => stage.keys.get("somebody____")), "SERVICE_OVERLOADED");
    await stage.later(GRACE_MS - RELOAD_MS - 2);
    assert.equal(await stage.keys.get(stage.id), first);
    await stage.later(1);
    assert.equal(await codeOf(() => stage.keys.get(stage.id)), "SERVICE_OVERLOADED");
    stage.redis.away = false;
    assert.equal(await stage.keys.get(stage.id), first);
    assert.deepEqual(
      stage.notices.map(({ level, message }) => `${level} ${message.slice(0, 30)}`),
      ["warn API keys cannot be looked up: ", "info API keys can be looked up agai"],
    );
  });
});

describe("what is written", () => {
  test("a key twice is refused; a record that cannot be read counts as none", async () => {
    const stage = new Stage();
    await assert.rejects(stage.keys.add(stage.made.record), /there is a key .* already/);
    stage.redis.hash.set("brokenbroken", "{");
    assert.equal(await stage.keys.get("brokenbroken"), undefined);
    assert.deepEqual(await stage.keys.list(), [stage.made.record]);
  });

  test("waits for a replica, and says when none has it", async () => {
    const stage = new Stage();
    await stage.keys.add(makeKey("u2", "paid").record);
    assert.equal(stage.redis.asked("WAIT"), 1);
    stage.redis.replicas = 0;
    assert.equal(await stage.keys.revoke(stage.id), true);
    assert.match(stage.notices[0]!.message, /it is done, but no replica has it yet/);
  });

  test("one secret for all, whoever is first", async () => {
    const stage = new Stage();
    const other = new KeyRedis(
      stage.redis,
      { reloadMs: RELOAD_MS, graceMs: GRACE_MS, waitMs: 200, key: (name) => name },
      stage.clock,
      stage.events,
    );
    const [a, b] = await Promise.all([stage.keys.secret(), other.secret()]);
    assert.equal(a, b);
    assert.ok(a.length >= 43);
  });
});
