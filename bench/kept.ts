/**
 * What keeping a finished record costs: as bytes outside of the heap (`engine/memory/packed.ts`), and as an object.
 *
 *   node bench/kept.ts [results kept, 200000] [bytes of an output, 1500]
 *
 * Each way gets a process of its own. A record is made, kept, and dropped when so many newer ones are kept; CPU of all
 * threads per record, the collector's helpers included, and resident memory at the end.
 */
import { spawnSync } from "node:child_process";
import { Fifo } from "../src/core/fifo.ts";
import { Table } from "../src/core/table.ts";
import { Packed } from "../src/engine/memory/packed.ts";
import { TaskRecord } from "../src/engine/memory/record.ts";
import { Holdings } from "../src/engine/memory/records.ts";
import { newId } from "../src/engine/ids.ts";

const [kept = "200000", bytes = "1500", way] = process.argv.slice(2);
const SEED = 7;
const RATE_PER_MS = 20;

function finished(at: number): TaskRecord {
  const output = `[${"0.25,".repeat(Number(bytes) / 5)}${at}]`;
  const task = {
    id: newId(at),
    tenant: "a",
    tier: 0,
    model: "m",
    input: "",
    parameters: "",
    content: "",
    createdAt: at,
    deadlineAt: at + 1000,
  };
  const record = new TaskRecord(task, {}, at);
  record.state = "done";
  record.outcome = { ok: true, output: Buffer.from(output).toString("latin1") };
  record.settledAt = at;
  record.delivered = true;
  return record;
}

function keeper(): (record: TaskRecord, at: number) => void {
  if (way === "nothing") return () => {};
  if (way === "objects") {
    const byId = new Table<TaskRecord>(SEED, 12);
    const order = new Fifo<TaskRecord>();
    return (record) => {
      record.task = { ...record.task, input: "", parameters: "", content: "" };
      byId.set(record.task.id, record);
      order.push(record);
      if (byId.size > Number(kept)) byId.delete(order.shift()!.task.id);
    };
  }
  const holdings = new Holdings(SEED);
  const ttlMs = Number(kept) / RATE_PER_MS;
  const packed = new Packed(holdings, () => ttlMs, SEED, { rescue: () => {} });
  return (record, at) => {
    packed.add(record);
    packed.sweep(holdings.of("a"), at);
  };
}

async function run(): Promise<void> {
  const keep = keeper();
  let made = 0;
  const make = async (count: number): Promise<void> => {
    for (let n = 0; n < count; n++) {
      const at = ++made / RATE_PER_MS;
      keep(finished(at), at);
      if (n % 1000 === 0) await new Promise((resolve) => setImmediate(resolve));
    }
  };
  await make(Number(kept) * 1.5);
  const before = process.cpuUsage();
  await make(Number(kept) * 3);
  const { user, system } = process.cpuUsage(before);
  const us = ((user + system) / (Number(kept) * 3)).toFixed(2);
  const mb = Math.round(process.memoryUsage.rss() / 2 ** 20);
  process.stdout.write(`${way!.padEnd(8)} ${us} µs CPU a record, ${mb} MB resident\n`);
}

if (way !== undefined) await run();
else {
  for (const each of ["packed", "objects", "nothing"])
    spawnSync(process.execPath, [import.meta.filename, kept, bytes, each], { stdio: "inherit" });
}
