/** The fake Redis and its Lua against a real server: the same commands, the same replies. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import fc from "fast-check";
import { type Clock, SystemClock } from "../../../src/app/clock.ts";
import { VirtualClock } from "../../../src/cli/plan/virtual-clock.ts";
import { RedisLink } from "../../../src/engine/redis/client/link.ts";
import { type Arg, RedisError, type RedisReply } from "../../../src/engine/redis/client/resp.ts";
import { type Server, startServer } from "../../engine/redis-client/servers.ts";
import { FakeRedis } from "./redis.ts";

const RUNS = 300;
/** Lifetimes and idle times that no run of this test reaches; replies within it count as equal. */
const LONG_MS = 1_000_000;
const COARSE_MS = 500_000;

let server: Server;
let link: RedisLink;
before(async () => {
  server = await startServer({ appendonly: "no" });
  const options = {
    host: "127.0.0.1",
    port: server.port,
    connectTimeoutMs: 20_000,
    commandTimeoutMs: 60_000,
  };
  link = await RedisLink.connect({ ...options, name: "test" }, new SystemClock());
});
after(async () => {
  link.close();
  await server[Symbol.asyncDispose]();
});

// ── comparing ────────────────────────────────────────────────────────────────────────────────────────

const texts = (reply: RedisReply): unknown =>
  Buffer.isBuffer(reply) ? reply.toString("latin1") : Array.isArray(reply) ? reply.map(texts) : reply;

/** Without what differs by nature: a script's error names its line, times pass. */
function comparable(command: readonly Arg[], reply: RedisReply | RedisError): unknown {
  if (reply instanceof RedisError) return `error ${reply.code}`;
  const verb = String(command[0]);
  const plain = texts(reply);
  const coarse = (ms: unknown): unknown => (typeof ms === "number" ? Math.round(ms / COARSE_MS) : ms);
  if (verb === "PTTL") return coarse(plain);
  if (verb === "TIME") return "a time";
  // In the order of Redis's own tables, which is nobody's promise.
  if (verb === "HKEYS" || verb === "HVALS") return (plain as string[]).toSorted();
  if (verb === "HGETALL") {
    const list = plain as string[];
    return list.flatMap((each, at) => (at % 2 === 0 ? [`${each}=${list[at + 1]}`] : [])).toSorted();
  }
  if (verb === "XPENDING" && Array.isArray((plain as unknown[])[0])) {
    return (plain as unknown[][]).map(([id, consumer, idle, count]) => [id, consumer, coarse(idle), count]);
  }
  if (verb === "XINFO") {
    return (plain as unknown[][]).map((group) =>
      String(command[1]) === "GROUPS" ? group : [...group.slice(0, 5), coarse(group[5])],
    );
  }
  return plain;
}

function fakeReply(fake: FakeRedis, command: readonly Arg[]): RedisReply | RedisError {
  try {
    return fake.execute(command);
  } catch (error) {
    if (error instanceof RedisError) return error;
    throw error;
  }
}

/** A clock that stands at the present time. */
function standing(): Clock {
  const now = Date.now();
  return { now: () => now, wall: () => now, at: () => ({ cancel: () => {} }) };
}

/** Plays the commands on both. */
async function compare(commands: readonly (readonly Arg[])[]): Promise<void> {
  const real = await link.callAll([["FLUSHALL"], ...commands]);
  const fake = new FakeRedis(standing());
  commands.forEach((command, at) => {
    const wanted = comparable(command, real[at + 1]!);
    const got = comparable(command, fakeReply(fake, command));
    const said = commands.slice(0, at + 1).map((words) => words.join(" "));
    assert.deepEqual(got, wanted, `after:\n${said.join("\n")}`);
  });
}

function plays(name: string, command: fc.Arbitrary<Arg[]>, numRuns = RUNS): void {
  test(name, async () => {
    const commands = fc.array(command, { minLength: 1, maxLength: 40 });
    await fc.assert(fc.asyncProperty(commands, compare), { numRuns });
  });
}

// ── what is played ───────────────────────────────────────────────────────────────────────────────────

const one = <Value>(...values: Value[]): fc.Arbitrary<Value> => fc.constantFrom(...values);
const key = one("a", "b", "c");
const value = one<Arg>("", "1", "-7", "x", 42, "é", Buffer.from([0, 13, 10, 255]));
const field = one("f", "g", "h", "é");
const ttl = one<Arg>(LONG_MS, 3 * LONG_MS);
const several = <Value>(of: fc.Arbitrary<Value>): fc.Arbitrary<Value[]> =>
  fc.array(of, { minLength: 1, maxLength: 3 });
const words = (...parts: (Arg | fc.Arbitrary<Arg | Arg[]>)[]): fc.Arbitrary<Arg[]> =>
  fc
    .tuple(
      ...parts.map((part) => (typeof part === "object" && "generate" in part ? part : fc.constant(part))),
    )
    .map((all) => all.flat());
const maybe = (...options: Arg[][]): fc.Arbitrary<Arg[]> => one<Arg[]>([], [], ...options);

const keys = fc.oneof(
  words(
    "SET",
    key,
    value,
    maybe(["NX"], ["XX"], ["NX", "XX"]),
    maybe(["GET"]),
    maybe(["PX", LONG_MS], ["KEEPTTL"], ["PX", 0], ["PX"]),
  ),
  words(one("GET", "TYPE", "PTTL", "PERSIST", "GETDEL"), key),
  words(one("MGET", "DEL", "UNLINK", "EXISTS"), several(key)),
  words("PEXPIRE", key, one<Arg>(LONG_MS, 3 * LONG_MS, 0, -1, "x"), maybe(["NX"], ["XX"], ["GT"], ["LT"])),
  words("INCRBY", key, one<Arg>(1, -3, "x", "01")),
  words("MSET", key, value, maybe(["b", "2"], ["b"])),
  words("SPUBLISH", key, value),
  words("TIME"),
  words("NOSUCH", key),
);

const hashes = fc.oneof(
  words("HSET", key, field, value, maybe(["f", "2"], ["f"])),
  words("HSETNX", key, field, value),
  words(one("HGET", "HEXISTS", "HSTRLEN"), key, field),
  words(one("HMGET", "HDEL"), key, several(field)),
  words(one("HGETALL", "HLEN", "HKEYS", "HVALS"), key),
  words("HINCRBY", key, field, one<Arg>(1, -2, "x")),
  words("DEL", key),
  words("SET", one("c"), value),
  words("PEXPIRE", key, ttl),
  words("PTTL", key),
);

const score = one<Arg>(0, 1, 2, -1.5, 1700000000000000, "inf", "-inf", "x", 0.1);
const bound = one<Arg>("-inf", "+inf", "(1", 1, 2, "(0", 0.1, "x");
const limit = maybe(["LIMIT", 0, 2], ["LIMIT", 1, 1], ["LIMIT", 1, -1], ["LIMIT", 5, 5]);
const sorted = fc.oneof(
  words(
    "ZADD",
    key,
    maybe(["NX"], ["XX"], ["GT"], ["LT"], ["CH"], ["GT", "CH"]),
    score,
    field,
    maybe([1, "g"], [1]),
  ),
  words("ZREM", key, several(field)),
  words("ZCARD", key),
  words("ZSCORE", key, field),
  words("ZCOUNT", key, bound, bound),
  words("ZRANGE", key, one<Arg>(0, 1, -2, -9), one<Arg>(-1, 0, 1, 9), maybe(["REV"]), maybe(["WITHSCORES"])),
  words("ZRANGE", key, bound, bound, "BYSCORE", maybe(["REV"]), limit, maybe(["WITHSCORES"])),
  words("ZRANGEBYSCORE", key, bound, bound, limit, maybe(["WITHSCORES"])),
  words("ZREMRANGEBYSCORE", key, bound, bound),
  words("ZPOPMIN", key, maybe([2], [0], [-1])),
  words("SET", one("c"), value),
);

const stream = one("s", "t", "u");
const id = one("1-1", "1-2", "2-1", "3-0", "3", "5-5", "7-1", "x");
const from = one("-", "+", "0", "1-1", "(1-2", "3", "(3", "9");
const consumer = one("x", "y", "z");
const group = one("g", "g", "g", "other");
const idle = one<Arg>(0, LONG_MS);
const streams = fc.oneof(
  {
    weight: 4,
    arbitrary: words(
      "XADD",
      stream,
      maybe(["NOMKSTREAM"], ["MAXLEN", 2], ["MINID", "2-0"]),
      fc.oneof(one("0-0", "3-*", "9-*"), id),
      field,
      value,
    ),
  },
  {
    weight: 3,
    arbitrary: words("XGROUP", "CREATE", stream, group, one("0", "$", "1-2"), maybe(["MKSTREAM"])),
  },
  {
    weight: 6,
    arbitrary: words(
      "XREADGROUP",
      "GROUP",
      group,
      consumer,
      maybe(["COUNT", 1], ["COUNT", 2]),
      maybe(["NOACK"]),
      "STREAMS",
      stream,
      one(">", ">", ">", "0", "1-1"),
    ),
  },
  words("XREADGROUP", "GROUP", "g", consumer, "COUNT", 2, "STREAMS", "s", "t", ">", ">"),
  words("XREADGROUP", "GROUP", "g", consumer, "STREAMS", "s", "t", ">"),
  { weight: 2, arbitrary: words("XACK", stream, group, several(id)) },
  { weight: 2, arbitrary: words("XDEL", stream, several(id)) },
  words("XLEN", stream),
  words(one("XRANGE", "XREVRANGE"), stream, from, from, maybe(["COUNT", 1], ["COUNT", 2])),
  words("XTRIM", stream, "MAXLEN", one<Arg>(0, 1, 3)),
  words("XTRIM", stream, "MINID", id),
  words("XPENDING", stream, group),
  {
    weight: 2,
    arbitrary: words(
      "XPENDING",
      stream,
      group,
      maybe(["IDLE", COARSE_MS], ["IDLE", 0]),
      from,
      from,
      one<Arg>(1, 10),
      maybe(["x"], ["y"]),
    ),
  },
  {
    weight: 3,
    arbitrary: words(
      "XCLAIM",
      stream,
      group,
      consumer,
      idle,
      several(id),
      maybe(["IDLE", 2 * LONG_MS], ["RETRYCOUNT", 5]),
      maybe(["JUSTID"], ["FORCE"]),
    ),
  },
  {
    weight: 2,
    arbitrary: words(
      "XAUTOCLAIM",
      stream,
      group,
      consumer,
      idle,
      one("0", "1-2", "-", "x"),
      maybe(["COUNT", 1], ["COUNT", 2]),
      maybe(["JUSTID"]),
    ),
  },
  words("XGROUP", one("DELCONSUMER", "CREATECONSUMER"), stream, group, consumer),
  words("XGROUP", one("DESTROY"), stream, group),
  words("XGROUP", "SETID", stream, group, one("0", "$", "1-2")),
  words("XINFO", "GROUPS", stream),
  words("XINFO", "CONSUMERS", stream, group),
  words("SET", one("u"), value),
  words("DEL", stream),
);

describe("random commands", () => {
  plays("keys and strings", keys);
  plays("hashes", hashes);
  plays("sorted sets", sorted);
  plays("streams with groups", streams, 3 * RUNS);
});

test("a transaction", async () => {
  const commands = fc.array(fc.oneof(hashes, streams), { minLength: 1, maxLength: 6 });
  const property = fc.asyncProperty(commands, async (some) => {
    const real = await link.callAll([["FLUSHALL"], ["MULTI"], ...some, ["EXEC"]]);
    const wanted = real.at(-1)!;
    // Words that are wrong by their number are refused before the transaction begins.
    if (wanted instanceof RedisError && wanted.code === "EXECABORT") return;
    const fake = new FakeRedis(standing());
    let got: RedisReply | RedisError;
    try {
      got = fake.transaction(some);
    } catch (error) {
      got = error as RedisError;
    }
    const each = (reply: RedisReply | RedisError): unknown =>
      Array.isArray(reply) ? reply.map((one, at) => comparable(some[at]!, one)) : comparable([], reply);
    assert.deepEqual(each(got), each(wanted));
  });
  await fc.assert(property, { numRuns: RUNS });
});

// ── Lua ──────────────────────────────────────────────────────────────────────────────────────────────

const SNIPPETS = [
  "return { 1, 2.9, -2.9, 'a', true, false, 4 }",
  "return { 1, nil, 3 }",
  "return { ok = 'fine' }",
  "return redis.error_reply('OVERTAKEN by another')",
  "return redis.error_reply('oops')",
  "return redis.status_reply('fine')",
  "return nonexistent",
  "return tostring(1700000000000000) .. ' ' .. 1e15 .. ' ' .. 0.1 .. ' ' .. 100 .. ' ' .. -0.5 .. ' ' .. 1e100",
  "return string.format('%d %s %5d|%-5d|%05d %x %.3f %g', 1700000000000000, 'a', 42, 42, 42, 255, 1/3, 0.1)",
  "return { string.find('a,b,c', ',', 1, true), string.find('abc', 'b(.)'), string.sub('hello', -3, -2), string.sub('hello', 2) }",
  "return { string.match('12 rest of it', '^(%d+) (.*)$') }",
  "return { string.match('a:b:c', '[^:]*$'), string.match('x', '%d') or 'none', #string.match('ab', '()b' and 'b') }",
  "local t = {} for w in string.gmatch('a bb  ccc', '%S+') do t[#t + 1] = w end return t",
  "local t = {} for w in string.gmatch(',a,,b,', '[^,]+') do t[#t + 1] = w end return t",
  "return { string.gsub('hello world', 'o', '0'), string.gsub('abc', '%w', '%0%0') }",
  "local t = { 5, 3, 9, 1 } table.sort(t) table.insert(t, 10) table.insert(t, 1, 0) table.remove(t, 2) return { table.concat(t, ','), #t }",
  "local t = { 5, 3, 9 } table.sort(t, function(a, b) return a > b end) return t",
  "local n = 0 for k, v in pairs({ a = 1, b = 2, 3 }) do n = n + v end return n",
  "local function f(n) if n == 0 then return 0, 'z' end return f(n - 1) end return { f(100) }",
  "return { select('#', unpack({ 1, 2, 3 })), (unpack({ 7, 8 })) }",
  "local a, b, c = (function(...) return ... end)(1, 2) return { a, b, tostring(c) }",
  "local i = 0 repeat local j = i i = i + 1 until j >= 3 return i",
  "local s = 0 for i = 10, 1, -3 do s = s + i end while true do s = s + 1 if s > 30 then break end end return s",
  "return { 7 % 3, -7 % 3, 2 ^ 10, 7 / 2 * 2, '10' + 5, 3 .. 4 }",
  "return { not nil, nil == false, 1 < 2, 'a' < 'b', (nil or 'x'), (false and 1) == false }",
  "return 1 < 'x'",
  "return {} .. 'x'",
  "local t = nil return t.x",
  "return { pcall(function() error('no') end) == false, (pcall(function() return 1 end)) }",
  "return { tonumber('0x10'), tonumber('1e3'), tostring(tonumber('x')), tonumber(' 12 '), tonumber('ff', 16) }",
  "return { math.max(1, 5, 3), math.min(2, -1), math.floor(-1.5), math.ceil(1.2), math.abs(-3), tostring(math.huge) }",
  "return { struct.pack('>I4I2Bc3', 7, 258, 9, 'abc'), struct.unpack('>I4', '\\0\\0\\1\\2') }",
  "return { struct.pack('<dhi8', 1.5, -2, -3), struct.unpack('<dhi8', struct.pack('<dhi8', 1.5, -2, -3)) }",
  "return { struct.unpack('>Hc0', '\\0\\3abc') }",
  "return cmsgpack.pack({ 1, -1, 'x', 127, 128, 300, 70000, 5000000000, -200, -70000, 1.5, true, { 1, 2 } })",
  "local t = cmsgpack.unpack(cmsgpack.pack({ a = 1 })) return t.a",
  "return { cmsgpack.unpack(cmsgpack.pack(1700000000000000, 'b', { 3 })) }",
  "return cjson.decode('[1,\"a\",[true,null]]')",
  "return { cjson.decode('{\"a\":{\"b\":[1,2,3]}}').a.b[3], cjson.encode({ 1, 'a', { x = true } }) }",
  "return redis.sha1hex('abc')",
  "local t = redis.pcall('INCRBY', KEYS[1], 'x') return t.err",
  "redis.call('SET', KEYS[1], 'a') redis.call('HGET', KEYS[1], 'b') return 1",
  "redis.call('SET', KEYS[1], 1.5) redis.call('SET', KEYS[2], 1700000000000001) return redis.call('MGET', KEYS[1], KEYS[2], 'none')",
  "return { redis.call('SET', KEYS[1], 'a').ok, redis.call('GET', 'none') == false, redis.call('HMGET', 'none', 'a', 'b') }",
  "local t = { 1, 2, 3 } t[#t] = nil t[5] = 5 t[3] = 3 t[4] = 4 return { #t, t[5] }",
  "local t = {} t['a b'] = 1 t[1] = 'x' t.y = { z = 2 } t.y.z = t.y.z + 1 return { t['a b'], t.y.z, #t }",
  "local a, b = 1, 2 a, b = b, a return { a, b }",
  "return ('x'):rep(3) .. ('ab'):upper() .. #'\\n\\65' .. [[long]] -- a comment",
  "return bit.band(12, 10) + bit.lshift(1, 4) + bit.bor(1, 2)",
  "if #KEYS > 5 then return 1 elseif #ARGV == 2 then return ARGV[2] else return 3 end",
] as const;

test("Lua computes what Redis's Lua computes", async () => {
  for (const source of SNIPPETS) await compare([["EVAL", source, 2, "k1", "k2", "one", "two"]]);
});

// ── time ─────────────────────────────────────────────────────────────────────────────────────────────

describe("on virtual time", () => {
  test("a key expires, and an entry's idle time grows", async () => {
    const clock = new VirtualClock();
    const fake = new FakeRedis(clock);
    const ask = (...command: Arg[]): unknown => texts(fake.execute(command));
    ask("SET", "a", "1", "PX", 100);
    ask("XGROUP", "CREATE", "s", "g", "0", "MKSTREAM");
    const first = ask("XADD", "s", "*", "f", "1") as string;
    ask("XREADGROUP", "GROUP", "g", "x", "STREAMS", "s", ">");
    await clock.run(clock.now() + 100);
    assert.equal(ask("GET", "a"), "1");
    assert.deepEqual(ask("XPENDING", "s", "g", "IDLE", "101", "-", "+", "9"), []);
    await clock.run(clock.now() + 1);
    assert.equal(ask("GET", "a"), null);
    assert.deepEqual(ask("XPENDING", "s", "g", "IDLE", "101", "-", "+", "9"), [[first, "x", 101, 1]]);
    assert.deepEqual(ask("XCLAIM", "s", "g", "y", 101, first, "JUSTID"), [first]);
    assert.deepEqual(ask("XCLAIM", "s", "g", "z", 101, first, "JUSTID"), []);
  });

  test("a reader that blocks is served in its turn, or when its time is over", async () => {
    const clock = new VirtualClock();
    const fake = new FakeRedis(clock);
    fake.execute(["XGROUP", "CREATE", "s", "g", "0", "MKSTREAM"]);
    const heard: string[] = [];
    const read = (name: string, ms: number): (() => void) =>
      fake.submit(
        ["XREADGROUP", "GROUP", "g", name, "COUNT", 1, "BLOCK", ms, "STREAMS", "s", ">"],
        (reply) => {
          heard.push(`${name} ${reply === null ? "nothing" : "something"}`);
        },
      );
    read("x", 100);
    const giveUp = read("y", 0);
    read("z", 0);
    giveUp();
    await clock.run(clock.now() + 200);
    fake.execute(["XADD", "s", "*", "f", "1"]);
    fake.execute(["XADD", "s", "*", "f", "2"]);
    assert.deepEqual(heard, ["x nothing", "z something"]);
  });
});
