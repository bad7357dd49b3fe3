/**
 * What the journal costs: `node bench/journal.ts [DIR]`, about five seconds, one line on stdout.
 *
 *  - rows/s and ms a commit: 100 new records of 2 KB are said and waited for, again and again; half of the
 *    commits took less than the figure;
 *  - a lone row: the same with one record at a time: the disk's fsync and two hops between threads;
 *  - lives/s: tasks with all they need (save, then an outcome of 2 KB, then forget), 100 of each a commit;
 *  - µs a change: CPU of the main thread over those lives, with everything: gathering, copying to the
 *    thread, hearing back.
 * The texts are made beforehand. DIR chooses the disk; the default is the directory for passing files.
 */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { openJournal, type Journal } from "../src/engine/memory/journal.ts";

const TASK = "t".repeat(2000);
const NEW = '{"attempt":0}';
const OUTCOME = "o".repeat(2000);

interface Commits {
  readonly rowsPerSecond: number;
  readonly medianMs: number;
}

async function commits(journal: Journal, name: string, count: number, rows: number): Promise<Commits> {
  const took: number[] = [];
  const startedAt = performance.now();
  for (let n = 0; n < count; n++) {
    const saidAt = performance.now();
    for (let row = 0; row < rows; row++) journal.save(`${name}-${n}-${row}`, TASK, NEW);
    await journal.flushed();
    took.push(performance.now() - saidAt);
  }
  const seconds = (performance.now() - startedAt) / 1000;
  took.sort((a, b) => a - b);
  return { rowsPerSecond: (count * rows) / seconds, medianMs: took[count >> 1] ?? 0 };
}

/** A hundred tasks a turn; each gets its outcome 10 turns later and is forgotten 50 turns later. */
async function lives(journal: Journal, turns: number): Promise<{ perSecond: number; microseconds: number }> {
  const ids = Array.from({ length: turns * 100 }, (_, n) => `life-${n}-0123456789abcdef`);
  const cpu = process.threadCpuUsage();
  const startedAt = performance.now();
  let changes = 0;
  for (let turn = 0; turn < turns + 50; turn++) {
    for (let n = 0; n < 100; n++) {
      const [fresh, done, old] = [turn, turn - 10, turn - 50].map((at) =>
        at < 0 ? undefined : ids[at * 100 + n],
      );
      if (fresh !== undefined) journal.save(fresh, TASK, NEW);
      if (done !== undefined) journal.update(done, OUTCOME);
      if (old !== undefined) journal.forget(old);
      changes += Number(fresh !== undefined) + Number(done !== undefined) + Number(old !== undefined);
    }
    await journal.flushed(); // or a slow disk would let whole lives cancel out before they are written
  }
  const seconds = (performance.now() - startedAt) / 1000;
  const { user, system } = process.threadCpuUsage(cpu);
  return { perSecond: ids.length / seconds, microseconds: (user + system) / changes };
}

const dir = mkdtempSync(join(process.argv[2] ?? tmpdir(), "ferry-bench-"));
try {
  const { journal } = await openJournal(join(dir, "data"), (why) => {
    throw why;
  });
  await commits(journal, "warm", 50, 100);
  const hundred = await commits(journal, "hundred", 400, 100);
  const lone = await commits(journal, "lone", 1000, 1);
  const life = await lives(journal, 800);
  await journal.close();
  const perSecond = Math.round(hundred.rowsPerSecond);
  const rows = `${perSecond} rows/s at ${hundred.medianMs.toFixed(2)} ms a commit of 100`;
  const rest = `a lone row ${lone.medianMs.toFixed(2)} ms; ${Math.round(life.perSecond)} whole lives/s`;
  const cost = `main thread ${life.microseconds.toFixed(2)} µs a change`;
  process.stdout.write(`journal, 2 KB rows: ${rows}; ${rest}; ${cost}\n`);
} finally {
  rmSync(dir, { recursive: true, force: true });
}
