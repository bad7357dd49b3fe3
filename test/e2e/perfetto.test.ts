/** The last seconds of a whole Ferry as a trace. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { checkTrace, type Trace } from "../observe/trace-format.ts";
import { eventually, Ferry } from "./harness.ts";

test("a trace of a Ferry under load keeps the rules and shows batches with their requests", async () => {
  const model = { name: "sim", backend: { kind: "simulated", workers: 2, baseMs: 20 }, maxBatchSize: 16 };
  await using ferry = await Ferry.start({
    models: [model, { ...model, name: "quiet" }],
    requestLog: { recent: 500 },
  });
  for (let round = 0; round < 5; round++) {
    await Promise.all(
      Array.from({ length: 100 }, (_, at) => ferry.infer(`${round} ${at}`, { model: "sim" })),
    );
  }
  await ferry.accept({ input: "later", model: "sim" });
  assert.equal((await ferry.post("{}")).status, 400);
  let trace: Trace | undefined;
  await eventually(async () => {
    const answer = await ferry.admin("/internal/trace?seconds=60");
    assert.equal(answer.status, 200, answer.text);
    trace = JSON.parse(answer.text) as Trace;
    return trace.traceEvents.some(({ name }) => name === "400 enterprise" || name.startsWith("400"));
  });
  const { traceEvents, otherData } = trace!;
  checkTrace(traceEvents);
  const batches = traceEvents.filter(({ cat }) => cat === "batch");
  assert.ok(batches.some(({ name }) => name === "F 16/16"));
  const arrows = traceEvents.filter(({ ph }) => ph === "s").length;
  const shown = Number(otherData["requests"]);
  assert.ok(arrows > 100 && arrows <= shown, `${arrows} arrows, ${shown} requests`);
  assert.equal(shown + Number(otherData["requests_left_out"]), 500);
  for (const wrong of ["0", "61", "abc", "1.5", "-1", ""])
    assert.equal((await ferry.admin(`/internal/trace?seconds=${wrong}`)).status, 400, wrong);
  assert.equal((await ferry.admin("/internal/trace")).status, 200);
});
