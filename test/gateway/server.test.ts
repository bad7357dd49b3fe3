import assert from "node:assert/strict";
import { once } from "node:events";
import { connect } from "node:net";
import { test } from "node:test";
import { setImmediate as turn } from "node:timers/promises";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { SystemClock } from "../../src/app/clock.ts";
import type { Exchange } from "../../src/gateway/exchange.ts";
import { Listener, type Routes } from "../../src/gateway/server.ts";
import { Events } from "../../src/observe/events.ts";
import { LIMITS } from "./edge.ts";

setFlagsFromString("--expose-gc");
const collect = runInNewContext("gc") as () => void;
/** Far more than it takes; without the end of it the test would hang when it fails. */
const MAX_TURNS = 100;

test("a connection that waits for its next request holds nothing of those before it", async () => {
  const seen: WeakRef<Exchange>[] = [];
  const answer = (exchange: Exchange): void => {
    seen.push(new WeakRef(exchange));
    exchange.ending = { queuedAt: 0, attempt: 1 };
    exchange.send(200, "{}");
  };
  const routes: Routes = { "/": { GET: answer } };
  const limits = { ...LIMITS, keepAliveTimeoutMs: 600_000 };
  const listener = new Listener(routes, limits, new SystemClock(), new Events());
  const { port } = new URL(await listener.listen("127.0.0.1", 0));
  const socket = connect(Number(port), "127.0.0.1");
  try {
    // All in one piece: each comes while the one before it is not over.
    socket.write("GET / HTTP/1.1\r\nhost: here\r\n\r\n".repeat(5));
    let told = "";
    while (told.split("{}").length <= 5) told += String((await once(socket, "data"))[0]);
    for (let turns = 0; seen.some((each) => each.deref() !== undefined) && turns < MAX_TURNS; turns++) {
      await turn();
      collect();
    }
    assert.deepEqual(
      seen.map((each) => each.deref() !== undefined),
      [false, false, false, false, false],
    );
  } finally {
    socket.destroy();
    listener.close();
  }
});

/** Far more than a connection may have unanswered, in many reads. */
const FLOOD = 20_000;
const QUESTION = `GET /slow?${"a".repeat(40)} HTTP/1.1\r\nhost: here\r\n\r\n`;
/** Node parses what it has read: 64 unanswered ones, and what one read of 64 KiB brings beyond them. */
const MOST_OPEN = 64 + Math.ceil(65_536 / QUESTION.length);

test("a connection with 64 unanswered requests is not read from until half of them are answered", async () => {
  const waiting: Exchange[] = [];
  let answered = 0;
  let most = 0;
  const routes: Routes = { "/slow": { GET: (exchange) => void waiting.push(exchange) } };
  const listener = new Listener(routes, LIMITS, new SystemClock(), new Events());
  const { port } = new URL(await listener.listen("127.0.0.1", 0));
  const socket = connect(Number(port), "127.0.0.1");
  try {
    socket.write(QUESTION.repeat(FLOOD));
    let told = "";
    const all = new Promise<void>((resolve) => {
      socket.on("data", (chunk: Buffer) => {
        told += chunk.toString("latin1");
        // Bodies are their place in line.
        if (told.endsWith(`"${FLOOD - 1}"`)) resolve();
      });
    });
    while (answered < FLOOD) {
      while (waiting.length === 0) await turn();
      for (let turns = 0; turns < 5; turns++) await turn();
      most = Math.max(most, listener.open);
      // The last first: answers leave in the order of their requests all the same.
      const from = answered;
      answered += waiting.length;
      const batch = waiting.splice(0);
      for (let at = batch.length - 1; at >= 0; at--) batch[at]!.send(200, `"${from + at}"`);
    }
    await all;
    assert.ok(most <= MOST_OPEN, `${most} requests were open at once`);
    assert.deepEqual(
      [...told.matchAll(/\r\n\r\n"(\d+)"/g)].map(([, place]) => Number(place)),
      Array.from({ length: FLOOD }, (_, place) => place),
    );
  } finally {
    socket.destroy();
    listener.close();
  }
});

test("bodies behind unanswered requests do not start the reading again", async () => {
  const waiting: Exchange[] = [];
  const read = async (exchange: Exchange): Promise<void> => {
    await exchange.body();
    waiting.push(exchange);
  };
  const listener = new Listener({ "/": { POST: read } }, LIMITS, new SystemClock(), new Events());
  const { port } = new URL(await listener.listen("127.0.0.1", 0));
  const socket = connect(Number(port), "127.0.0.1");
  try {
    const body = JSON.stringify("a".repeat(900));
    const post = `POST / HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ncontent-length: ${body.length}\r\n\r\n${body}`;
    const count = 1000;
    socket.write(post.repeat(count));
    let told = "";
    socket.on("data", (chunk: Buffer) => (told += chunk.toString("latin1")));
    while (waiting.length < 64) await turn();
    for (let turns = 0; turns < 50; turns++) await turn();
    assert.ok(listener.open <= 64 + Math.ceil(65_536 / post.length), `${listener.open}`);
    let answered = 0;
    while (answered < count) {
      await turn();
      for (const exchange of waiting.splice(0)) {
        exchange.send(200, "{}");
        answered++;
      }
    }
    while (told.split("HTTP/1.1 200").length <= count) await once(socket, "data");
  } finally {
    socket.destroy();
    listener.close();
  }
});

test("requests behind a refused one that ends the connection are read no further than others", async () => {
  const waiting: Exchange[] = [];
  const routes: Routes = { "/slow": { GET: (exchange) => void waiting.push(exchange) } };
  const listener = new Listener(routes, LIMITS, new SystemClock(), new Events());
  const { port } = new URL(await listener.listen("127.0.0.1", 0));
  const socket = connect(Number(port), "127.0.0.1");
  try {
    const flawed = "GET /slow HTTP/1.1\r\nhost: here\r\nhost: there\r\n\r\n";
    // More than the buffers of both sockets hold: all of it leaves only where the other side reads on.
    const flood = Buffer.from(QUESTION + flawed + QUESTION.repeat(10 * FLOOD));
    let taken = false;
    socket.on("error", () => {}).write(flood, () => (taken = true));
    while (waiting.length === 0) await turn();
    for (let turns = 0; turns < 2000; turns++) await turn();
    assert.equal(taken, false, "all of it was read");
    assert.equal(listener.open, 2);
    waiting[0]!.send(200, "{}");
    while (listener.open > 0) await turn();
  } finally {
    socket.destroy();
    listener.close();
  }
});

test("what a client sends behind Connection: close costs it no answer", async () => {
  const waiting: Exchange[] = [];
  const routes: Routes = { "/slow": { GET: (exchange) => void waiting.push(exchange) } };
  const listener = new Listener(routes, LIMITS, new SystemClock(), new Events());
  const { port } = new URL(await listener.listen("127.0.0.1", 0));
  const socket = connect(Number(port), "127.0.0.1");
  try {
    const last = "GET /slow HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n";
    socket.write(QUESTION + last + QUESTION.repeat(3));
    let told = "";
    socket.on("data", (chunk: Buffer) => (told += chunk.toString("latin1")));
    const closed = once(socket, "close");
    while (waiting.length < 2) await turn();
    for (const [place, exchange] of waiting.entries()) exchange.send(200, `"${place}"`);
    await closed;
    assert.equal(waiting.length, 2, "nothing behind it is run");
    assert.deepEqual(told.match(/\r\n\r\n"\d"/g), ['\r\n\r\n"0"', '\r\n\r\n"1"']);
  } finally {
    socket.destroy();
    listener.close();
  }
});
