/**
 * `ferry plan`: how many workers a rate and a goal need, by running the serving code on virtual time. Service times
 * come from flags, from a measured worker (--measure), from a running Ferry (--learned); --replay uses recorded
 * requests. An impossible plan is one line and exit 1.
 */
import { Impossible } from "./plan/planner.ts";
import { type Call, type Command, type Console, expectNoWords, Failure, UsageError } from "./command.ts";
import { findPlan, planFlags, readAsk, readCost, readSettings } from "./plan-find.ts";
import { planLearned } from "./plan-learned.ts";
import { measureWorker } from "./plan-measure.ts";
import { replayFile } from "./plan-replay.ts";
import { planJson } from "./plan-text.ts";

export const plan: Command = {
  summary: "how many workers a rate and a latency goal need",
  usage: "plan --rate N --slo p99=TIME --service TIME [--batch N] [FLAGS]",
  examples: [
    {
      line: "ferry plan --rate 3000 --slo p99=150ms --service 100ms --batch 64",
      doc: "workers, latency, what happens if one dies",
    },
    {
      line: "ferry plan --measure http://gpu-1:9000/infer --rate 3000 --slo p99=150ms",
      doc: "the same with your worker's own times, and the YAML to paste",
    },
  ],
  flags: planFlags,

  async run(call: Call, console: Console): Promise<number> {
    expectNoWords(call);
    const settings = await readSettings(call, console);
    if (settings === undefined) return 1;
    try {
      if (call.text("replay") !== undefined) return await replayFile(call, console, settings);
      if (call.text("learned") !== undefined) return await planLearned(call, console, settings);
      if (call.text("measure") !== undefined) return await measureWorker(call, console, settings);
      const { service } = settings;
      if (service === undefined) {
        throw new UsageError("what does a batch take? Say --service 100ms, or --measure URL to find out");
      }
      const ask = await readAsk(call, settings, service);
      if (ask === undefined)
        throw new UsageError("ferry plan needs --rate and --slo, such as --rate 3000 --slo p99=150ms");
      const cost = readCost(call);
      const found = await findPlan(call, console, ask);
      console.out(
        call.is("json") ? `${JSON.stringify(planJson(found, found.inOrder, ask, cost))}\n` : found.text,
      );
      return 0;
    } catch (error) {
      if (error instanceof Impossible) throw new Failure(error.message);
      throw error;
    }
  },
};
