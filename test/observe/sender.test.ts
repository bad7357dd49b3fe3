/** The thread that sends rows and spans: what happens when it dies. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { Events } from "../../src/observe/events.ts";
import { PostgresLog } from "../../src/observe/request-log-postgres.ts";
import { RequestRow } from "../../src/observe/request-log.ts";
import { Sender, SenderTrouble, type Verb, type Verbs } from "../../src/observe/sender.ts";
import { sentCollector } from "../../src/observe/span-buffer.ts";
import { answered } from "./stage.ts";

const MORTAL = new URL("./mortal-thread.ts", import.meta.url);

function hearNotices() {
  const events = new Events();
  const said: string[] = [];
  events.on("notice", ({ level, message }) => said.push(`${level} ${message}`));
  return { events, said };
}

describe("the thread", () => {
  const find = { store: 1, id: "a", max: 1 };
  const old = { store: 1, days: 1, max: 1 };

  test("when it dies whoever waits hears of it, it is said once, and the next question starts another", async () => {
    const { events, said } = hearNotices();
    const sender = new Sender(events, MORTAL);
    const first = await sender.ask("deleteOldRows", old);
    const dies = [sender.ask("findRows", find), sender.ask("rowsEnd", { store: 1 })];
    for (const asked of dies)
      await assert.rejects(asked, (error) => error instanceof SenderTrouble && error.isOfTheThread);
    assert.equal(said.length, 1);
    assert.match(
      said[0]!,
      /^error the thread that sends rows and spans ended: a bug in the thread; requests go on/,
    );
    await assert.rejects(sender.ask("findRows", find), SenderTrouble);
    assert.equal(said.length, 1);
    assert.notEqual(await sender.ask("deleteOldRows", old), first);
    await assert.rejects(sender.ask("findRows", find), SenderTrouble);
    assert.equal(said.length, 2);
    await sender.close();
  });

  test("what it could not do is told with PostgreSQL's state, and does not end it", async () => {
    const { events, said } = hearNotices();
    const sender = new Sender(events, MORTAL);
    const refused = { message: "it refuses", state: "22000", isOfTheThread: false };
    await assert.rejects(sender.ask("insertRows", { store: 1, instance: "i", columns: [] }), refused);
    await sender.close();
    assert.deepEqual(said, []);
  });

  test("it ends with whoever started it, also when it never started", async () => {
    const { events, said } = hearNotices();
    await new Sender(events, MORTAL).close();
    const sender = new Sender(events, MORTAL);
    const waits = sender.ask("findRows", find);
    await sender.close();
    await assert.rejects(waits, SenderTrouble);
    await assert.rejects(sender.ask("deleteOldRows", old), /this is the end/);
    assert.deepEqual(said, []);
  });
});

/** Answers in the thread's place. */
class Stand {
  readonly asked: Verb[] = [];
  readonly rows: number[] = [];
  dies: Verb | undefined;
  away = false;

  async ask<Asked extends Verb>(verb: Asked, given: Verbs[Asked][0]): Promise<Verbs[Asked][1]> {
    this.asked.push(verb);
    if (verb === "rowsEnd") return new Promise(() => {});
    if (this.away) throw new SenderTrouble("ECONNREFUSED", { isOfTheThread: false });
    if (verb === this.dies) {
      this.dies = undefined;
      throw new SenderTrouble("the thread that sends it ended", { isOfTheThread: true });
    }
    if (verb === "insertRows") this.rows.push(...((given as Verbs["insertRows"][0]).columns[0] as number[]));
    return verb === "deleteOldRows" ? 0 : undefined;
  }
}

test("rows that were with a thread that died are written by the next one", async () => {
  const { events, said } = hearNotices();
  const clock = new VirtualClock(1000);
  const sender = new Stand();
  const settings = { flushMs: 100, maxBufferedRows: 100, writeTimeoutMs: 1000, retentionDays: 1 };
  const options = { ...settings, url: "postgres://u:secret@db/ferry", instance: "i" };
  const log = new PostgresLog(options, { clock, events, sender, random: () => 0.5 });
  await clock.run(clock.now() + 500);
  sender.dies = "insertRows";
  for (let seq = 1; seq <= 3; seq++) log.add(new RequestRow(seq, answered()));
  await clock.run(clock.now() + 150);
  assert.deepEqual([sender.rows, log.buffered], [[], 3]);
  log.add(new RequestRow(4, answered()));
  await clock.run(clock.now() + 5000);
  assert.deepEqual([sender.rows, log.buffered], [[1, 2, 3, 4], 0]);
  assert.equal(sender.asked.filter((verb) => verb === "openRows").length, 2);
  assert.equal(said.length, 2);
  assert.match(
    said[0]!,
    /^warn request log: PostgreSQL at db\/ferry is away: the thread that sends it ended/,
  );
  assert.match(said[1]!, /is back after \d s; 0 rows were dropped/);
  await log.close();
});

test("while PostgreSQL is away the oldest rows beyond the limit are dropped and counted", async () => {
  const { events, said } = hearNotices();
  const clock = new VirtualClock(1000);
  const sender = new Stand();
  sender.away = true;
  const options = { url: "postgres://db/ferry", instance: "i", retentionDays: 1, maxBufferedRows: 100 };
  const log = new PostgresLog(options, { clock, events, sender, random: () => 0.5 });
  for (let seq = 1; seq <= 120; seq++) {
    log.add(new RequestRow(seq, answered()));
    await clock.run(clock.now() + 100);
  }
  assert.equal(log.buffered, 100);
  sender.away = false;
  await clock.run(clock.now() + 60_000);
  assert.deepEqual([sender.rows[0], sender.rows.length, log.buffered], [21, 100, 0]);
  assert.match(said.at(-1)!, /is back after \d+ s; 20 rows were dropped/);
  await log.close();
});

test("spans that were with a thread that died are sent again, those that it cannot send are not", async () => {
  const start = { url: "http://c/v1/traces", timeoutMs: 1, about: {}, version: "1" };
  const sender = new Stand();
  sender.dies = "deliverSpans";
  const collector = sentCollector(sender, start);
  assert.deepEqual(await collector.deliver([]), { kind: "away", why: "the thread that sends it ended" });
  const broken = sentCollector({ ask: async () => Promise.reject(new SenderTrouble("no library")) }, start);
  await assert.rejects(broken.deliver([]), /no library/);
});
