/** The rules of the Trace Event Format that readers rely on. */
import assert from "node:assert/strict";

export interface TraceEvent {
  readonly ph: string;
  readonly name: string;
  readonly cat?: string;
  readonly ts?: number;
  readonly dur?: number;
  readonly pid: number;
  readonly tid: number;
  readonly id?: number;
  readonly bp?: string;
  readonly args?: Readonly<Record<string, unknown>>;
}

export interface Trace {
  readonly traceEvents: TraceEvent[];
  readonly otherData: Readonly<Record<string, unknown>>;
}

/** Fails unless a reader can draw all of it: known kinds, whole numbers, names, nested slices, paired arrows. */
export function checkTrace(events: readonly TraceEvent[]): void {
  const processes = new Set<number>();
  const threads = new Map<number, number>();
  for (const event of events) {
    checkEvent(event);
    if (event.name === "process_name") processes.add(event.pid);
    if (event.name === "thread_name") {
      assert.ok(!threads.has(event.tid), "a thread's id belongs to one process");
      threads.set(event.tid, event.pid);
    }
  }
  for (const { ph, pid, tid } of events) {
    assert.ok(processes.has(pid), `process ${pid} has a name`);
    if (ph !== "M" && ph !== "C") assert.equal(threads.get(tid), pid, `thread ${tid} has a name`);
  }
  const drawn = events.filter(({ ph }) => ph === "X");
  const slices = Map.groupBy(drawn, ({ tid }) => tid);
  for (const [tid, some] of slices) checkNested(some, tid);
  checkArrows(events, slices);
}

function checkEvent({ ph, pid, tid, ts, dur, name, args }: TraceEvent): void {
  assert.match(ph, /^[MXCsf]$/);
  assert.ok(Number.isInteger(pid) && pid > 0, `pid ${pid}`);
  assert.ok(Number.isInteger(tid) && tid > 0, `tid ${tid}`);
  assert.ok(name.length > 0);
  if (ph === "M") assert.ok(args !== undefined);
  else assert.ok(Number.isSafeInteger(ts), `ts ${ts}: whole microseconds`);
  if (ph === "X") assert.ok(Number.isSafeInteger(dur) && dur! >= 0, `dur ${dur}`);
  if (ph === "C") for (const value of Object.values(args!)) assert.equal(typeof value, "number");
}

/** Slices of a thread lie beside or inside each other. */
function checkNested(slices: readonly TraceEvent[], tid: number): void {
  const open: number[] = [];
  for (const { ts, dur, name } of slices.toSorted((a, b) => a.ts! - b.ts! || b.dur! - a.dur!)) {
    while (open.length > 0 && open.at(-1)! <= ts!) open.pop();
    const end = ts! + dur!;
    assert.ok(open.length === 0 || end <= open.at(-1)!, `"${name}" on thread ${tid} overlaps another`);
    open.push(end);
  }
}

function checkArrows(
  events: readonly TraceEvent[],
  slices: ReadonlyMap<number, readonly TraceEvent[]>,
): void {
  const all = events.filter(({ ph }) => ph === "s" || ph === "f");
  for (const [id, ends] of Map.groupBy(all, (end) => end.id)) {
    assert.deepEqual(ends.map(({ ph }) => ph).sort(), ["f", "s"], `arrow ${id} has both ends`);
    const [start, finish] = [ends.find(({ ph }) => ph === "s")!, ends.find(({ ph }) => ph === "f")!];
    assert.deepEqual([start.name, start.cat], [finish.name, finish.cat]);
    assert.equal(finish.bp, "e");
    assert.ok(start.ts! <= finish.ts!, `arrow ${id} goes forward`);
    for (const { tid, ts } of ends) {
      const held = slices.get(tid)?.some((slice) => slice.ts! <= ts! && ts! <= slice.ts! + slice.dur!);
      assert.ok(held, `arrow ${id} ends inside a slice`);
    }
  }
}
