/** RESP2 on paper, then one connection to a real server, and to servers that misbehave. */
import assert from "node:assert/strict";
import { once } from "node:events";
import * as net from "node:net";
import { after, describe, test } from "node:test";
import * as tls from "node:tls";
import fc from "fast-check";
import { SystemClock } from "../../../src/app/clock.ts";
import { LinkDown, RedisError, RedisLink } from "../../../src/engine/redis/client/link.ts";
import type { Arg, LinkOptions, RedisReply } from "../../../src/engine/redis/client/link.ts";
import { CommandWriter, ProtocolError, ReplyParser } from "../../../src/engine/redis/client/resp.ts";
import { startServer } from "./servers.ts";
import { certificate, key } from "./client-certificate.ts";

const clock = new SystemClock();
const links = new Set<RedisLink>();
after(() => links.forEach((link) => link.close()));

async function connect(port: number, options: Partial<LinkOptions> = {}): Promise<RedisLink> {
  const limits = { connectTimeoutMs: 20_000, commandTimeoutMs: 20_000, name: "test" };
  const link = await RedisLink.connect({ host: "127.0.0.1", port, ...limits, ...options }, clock);
  links.add(link);
  return link;
}

/** A server that says what the test tells it to; it answers the greeting (CLIENT SETNAME) by itself. */
async function pretend(
  secure: boolean,
  answer: (asked: string, socket: net.Socket) => void,
): Promise<net.Server> {
  const greet = (socket: net.Socket): void => {
    socket.on("error", () => {});
    socket.on("data", (chunk: Buffer) => {
      if (chunk.includes("SETNAME")) socket.write("+OK\r\n");
      else answer(chunk.toString("latin1"), socket);
    });
  };
  const server = secure ? tls.createServer({ key, cert: certificate }, greet) : net.createServer(greet);
  await once(server.listen(0, "127.0.0.1"), "listening");
  after(() => server.close());
  return server;
}

const portOf = (server: net.Server): number => (server.address() as net.AddressInfo).port;

// ── On paper ─────────────────────────────────────────────────────────────────────────────────────────

const bytes = fc.uint8Array({ maxLength: 40 }).map((array) => Buffer.from(array));
const { reply } = fc.letrec<{ reply: RedisReply }>((tie) => ({
  reply: fc.oneof(
    { maxDepth: 4 },
    bytes,
    fc.integer(),
    fc.constant(null),
    fc.array(tie("reply"), { maxLength: 5 }),
  ),
}));
const refusal = fc.stringMatching(/^[A-Z]{2,8} [ -~]{0,30}$/).map((text) => new RedisError(text));
const replies = fc.array(fc.oneof({ weight: 4, arbitrary: reply }, refusal), { minLength: 1, maxLength: 6 });

function encode(value: RedisReply | RedisError): Buffer {
  if (value instanceof RedisError) return Buffer.from(`-${value.message}\r\n`);
  if (value === null) return Buffer.from("$-1\r\n");
  if (typeof value === "number") return Buffer.from(`:${value}\r\n`);
  if (Array.isArray(value)) return Buffer.concat([Buffer.from(`*${value.length}\r\n`), ...value.map(encode)]);
  return Buffer.concat([Buffer.from(`$${value.length}\r\n`), value, Buffer.from("\r\n")]);
}

function parse(chunks: readonly Buffer[]): (RedisReply | RedisError)[] {
  const found: (RedisReply | RedisError)[] = [];
  const parser = new ReplyParser((value) => found.push(value));
  for (const chunk of chunks) parser.feed(chunk);
  return found;
}

describe("replies", () => {
  test("are the same wherever the stream is cut in two, and byte by byte", () => {
    fc.assert(
      fc.property(replies, (expected) => {
        const stream = Buffer.concat(expected.map(encode));
        for (let cut = 0; cut <= stream.length; cut++)
          assert.deepEqual(parse([stream.subarray(0, cut), stream.subarray(cut)]), expected);
        assert.deepEqual(parse([...stream].map((byte) => Buffer.from([byte]))), expected);
      }),
      { numRuns: 200 },
    );
  });

  test("are the same whatever the cuts", () => {
    fc.assert(
      fc.property(replies, fc.array(fc.nat(50)), (expected, sizes) => {
        const stream = Buffer.concat(expected.map(encode));
        const chunks: Buffer[] = [];
        let at = 0;
        for (const size of sizes) chunks.push(stream.subarray(at, (at += size)));
        assert.deepEqual(parse([...chunks, stream.subarray(at)]), expected);
      }),
      { numRuns: 1000 },
    );
  });

  test("of many megabytes in small chunks cost no more than their bytes", () => {
    const long = Buffer.alloc(8_000_000, "x");
    const many = Array.from({ length: 300_000 }, (_, n) => n);
    const stream = Buffer.concat([encode(long), encode(many)]);
    const chunks: Buffer[] = [];
    for (let at = 0; at < stream.length; at += 100) chunks.push(stream.subarray(at, at + 100));
    const startedAt = performance.now();
    const [text, numbers] = parse(chunks);
    // Linear is below 100 ms; quadratic would be minutes.
    assert.ok(performance.now() - startedAt < 10_000);
    assert.ok(long.equals(text as Buffer));
    assert.deepEqual(numbers, many);
  });

  test("an error inside an array is the whole reply", () => {
    const stream = Buffer.from("*3\r\n:1\r\n*2\r\n-OOM no\r\n-ERR later\r\n:2\r\n+OK\r\n");
    assert.deepEqual(parse([stream]), [new RedisError("OOM no"), Buffer.from("OK")]);
    assert.equal(new RedisError("OOM no").code, "OOM");
  });

  test("what is not RESP2 is refused", () => {
    for (const text of ["HTTP/1.1", "%1\r\n", ":1x\r\n", "$2\r\nabc\r\n", ":1\rx", "$9999999999\r\n"])
      assert.throws(() => parse([Buffer.from(text)]), ProtocolError, text);
    assert.throws(() => parse([Buffer.from("+".padEnd(70_000, "x")), Buffer.from("x")]), /does not end/);
  });
});

test("commands become the bytes that the protocol asks for, across slabs and beside them", () => {
  const size = fc.constantFrom(0, 1, 9, 10, 63, 64, 65, 100, 1000, 16_383, 16_384, 65_000, 70_000);
  const arg = fc.oneof(
    fc.string({ unit: "binary" }),
    fc.integer(),
    bytes,
    size.map((length) => "ö".repeat(length / 2)),
    size.map((length) => Buffer.alloc(length, "b")),
    size.map((length) => "a".repeat(length)),
  );
  fc.assert(
    fc.property(fc.array(fc.array(arg, { minLength: 1 }), { minLength: 1 }), (commands) => {
      const writer = new CommandWriter();
      for (const group of [commands.slice(0, 2), commands.slice(2)]) {
        for (const command of group) writer.add(command);
        const expected = group.map((command) =>
          encode(command.map((one) => (Buffer.isBuffer(one) ? one : Buffer.from(String(one))))),
        );
        assert.ok(Buffer.concat(writer.take()).equals(Buffer.concat(expected)));
      }
    }),
    { numRuns: 300 },
  );
});

// ── With a server ────────────────────────────────────────────────────────────────────────────────────

describe("a link", () => {
  test("answers calls in order; a refusal rejects a call and is a value in a group", async () => {
    await using server = await startServer();
    const link = await connect(server.port, { db: 3, name: "two words" });
    const body = Buffer.from([0, 13, 10, 255]);
    const [set, got, refused, pong] = await Promise.all([
      link.call(["SET", "key", body]),
      link.call(["GET", "key"]),
      link.callAll([["INCR", "key"], ["NONSENSE"], ["STRLEN", "key"]]),
      link.call(["PING", 17]),
    ]);
    assert.equal(String(set), "OK");
    assert.deepEqual(got, body);
    assert.deepEqual(
      refused.map((one) => (one instanceof RedisError ? one.code : one)),
      ["ERR", "ERR", 4],
    );
    assert.equal(String(pong), "17");
    await assert.rejects(link.call(["LPUSH", "key", 1]), { name: "RedisError", code: "WRONGTYPE" });
    assert.match(String(await link.call(["CLIENT", "INFO"])), /name=two-words .*db=3/);
    assert.deepEqual(await link.callAll([]), []);
  });

  test("takes replies and commands of megabytes", async () => {
    await using server = await startServer();
    const link = await connect(server.port);
    const big = Buffer.alloc(5_000_000, "big");
    const args: Arg[] = ["RPUSH", "list", big, "small", big];
    assert.equal(await link.call(args), 3);
    const list = (await link.call(["LRANGE", "list", 0, -1])) as Buffer[];
    assert.ok(big.equals(list[0]!) && String(list[1]) === "small" && big.equals(list[2]!));
  });

  test("that cannot be made says why in one line", async () => {
    await using server = await startServer({ requirepass: "secret" });
    const free = await pretend(false, () => {});
    const port = portOf(free);
    await new Promise((closed) => free.close(closed));
    await assert.rejects(
      connect(port),
      new RegExp(`^Error: redis 127.0.0.1:${port} is not reachable: nothing`),
    );
    await assert.rejects(connect(server.port, { password: "wrong" }), /refuses us: WRONGPASS/);
    await assert.rejects(connect(server.port, { password: "secret", db: 99 }), /refuses us: ERR DB index/);
    await assert.rejects(connect(1, { host: "no.such.host.invalid" }), /is not reachable/);
    const link = await connect(server.port, { username: "default", password: "secret" });
    assert.equal(String(await link.call(["PING"])), "PONG");
    server.pause();
    await assert.rejects(connect(server.port, { commandTimeoutMs: 50 }), /did not answer within 50 ms/);
  });

  for (const [what, words] of [
    ["in protected mode", "DENIED Redis is running in protected mode. In this mode connections are only …"],
    ["that has too many clients", "ERR max number of clients reached"],
  ] as const) {
    test(`a server ${what} says so before it is asked, and closes`, async () => {
      const server = net.createServer((socket) => {
        socket.on("error", () => {}).resume();
        socket.end(`-${words}\r\n`);
      });
      await once(server.listen(0, "127.0.0.1"), "listening");
      after(() => server.close());
      const why = words.split(". ")[0]!;
      await assert.rejects(connect(portOf(server)), { message: new RegExp(`refuses us: ${why}$`) });
    });
  }

  test("to a server that stands still ends in time, and its late replies reach nobody", async () => {
    await using server = await startServer();
    const link = await connect(server.port, { commandTimeoutMs: 100 });
    let downs = 0;
    link.onDown = () => void downs++;
    server.pause();
    const startedAt = performance.now();
    const lost = [link.call(["ECHO", "a"]), link.callAll([["ECHO", "b"]]), link.call(["ECHO", "c"])];
    const why = { name: "LinkDown", written: true, message: /did not answer within 100 ms/ };
    await Promise.all(lost.map((one: Promise<unknown>) => assert.rejects(one, why)));
    const tookMs = performance.now() - startedAt;
    assert.ok(tookMs >= 99 && tookMs < 15_000, `${tookMs} ms`);
    assert.equal(link.up, false);
    await assert.rejects(link.call(["ECHO", "d"]), { name: "LinkDown", written: false });
    server.resume();
    const next = await connect(server.port);
    for (let n = 0; n < 50; n++) assert.equal(String(await next.call(["ECHO", n])), String(n));
    link.close();
    assert.equal(downs, 1);
  });

  test("is not given up for the time that this process stood still", async () => {
    await using server = await startServer();
    const link = await connect(server.port, { commandTimeoutMs: 50 });
    const answer = link.call(["ECHO", "patience"]);
    // Written in this turn's end; then the process does nothing else for three time limits.
    setImmediate(() => {
      const until = performance.now() + 150;
      while (performance.now() < until);
    });
    assert.equal(String(await answer), "patience");
    assert.equal(link.up, true);
  });

  test("never gives one caller another's reply, whenever it ends", async () => {
    await using server = await startServer();
    let answered = 0;
    for (let round = 0; round < 100; round++) {
      const link = await connect(server.port);
      const calls = Array.from({ length: 50 }, async (_, n) => {
        try {
          assert.equal(String(await link.call(["ECHO", `${round}-${n}`])), `${round}-${n}`);
          answered++;
          if (n === round % 50) link.close();
        } catch (error) {
          assert.ok(error instanceof LinkDown, String(error));
        }
      });
      if (round % 10 === 0) link.close();
      await Promise.all(calls);
    }
    assert.ok(answered > 1000, `${answered}`);
  });

  test("hears what is published between the replies", async () => {
    await using server = await startServer();
    const [listener, speaker] = [await connect(server.port), await connect(server.port)];
    const heard: string[] = [];
    listener.onMessage = (channel, payload) => heard.push(`${channel} ${String(payload)}`);
    await listener.callAll([
      ["SSUBSCRIBE", "one"],
      ["SSUBSCRIBE", "two"],
      ["SUBSCRIBE", "three"],
    ]);
    const spoken = await Promise.all([
      speaker.call(["SPUBLISH", "one", "a"]),
      listener.call(["PING", "x"]),
      speaker.call(["SPUBLISH", "two", "b"]),
      speaker.call(["PUBLISH", "three", "c"]),
    ]);
    assert.deepEqual([spoken[0], String(spoken[1])], [1, "pong,x"]);
    await listener.call(["PING"]);
    assert.deepEqual(heard, ["one a", "two b", "three c"]);
  });

  test("ends when the server says what nobody asked, or nonsense, or nothing more", async () => {
    const tricks: [string, RegExp][] = [
      ["+1\r\n+2\r\n", /answered what nobody asked/],
      ["HTTP/1.1 400 Bad Request\r\n", /does not speak RESP2/],
      ["", /closed the connection/],
    ];
    for (const [text, why] of tricks) {
      const server = await pretend(false, (_, socket) =>
        text === "" ? socket.destroy() : socket.write(text),
      );
      const link = await connect(portOf(server));
      const { promise, resolve } = Promise.withResolvers<Error>();
      link.onDown = resolve;
      const answer = link.call(["PING"]).catch((error: Error) => error.name);
      assert.match((await promise).message, why);
      const got = await answer;
      assert.equal(String(got), text.startsWith("+") ? "1" : "LinkDown");
    }
  });

  test("speaks TLS, and only to a certificate that it can check", async () => {
    const server = await pretend(true, (_, socket) => socket.write("+PONG\r\n"));
    await assert.rejects(connect(portOf(server), { tls: true }), /is not reachable: self-signed certificate/);
    tls.setDefaultCACertificates([certificate]);
    const link = await connect(portOf(server), { tls: true, host: "localhost" });
    assert.equal(String(await link.call(["PING"])), "PONG");
  });
});
