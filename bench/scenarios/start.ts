/**
 * `start`: from spawn to the ready line, the median of ten.
 *
 * What a user waits for after `npm start`, and what a pod adds to a rolling update. One simulated
 * model, nothing on disk; the file cache is warm after the first start, which counts like the others.
 */
import { FerryServer } from "../server.ts";
import { figure, type Bench, type Report, type Scenario } from "../scenario.ts";

export const start: Scenario = {
  name: "start",
  summary: "from spawn to the ready line, one simulated model; median of 10",
  run,
};

async function run(bench: Bench): Promise<Report> {
  const starts = bench.quick ? 3 : 10;
  const times: number[] = [];
  for (let i = 0; i < starts; i++) {
    bench.progress(`start ${i + 1} of ${starts}`);
    await using server = await FerryServer.start({
      dir: bench.dir,
      models: [{ name: "bench", workers: 4, baseMs: 100 }],
    });
    times.push(server.readyMs);
  }
  times.sort((a, b) => a - b);
  const middle = times.length >> 1;
  const median = times.length % 2 === 1 ? times[middle]! : (times[middle - 1]! + times[middle]!) / 2;
  return {
    figures: [
      figure("start to ready, median", median, "ms", "<", 500),
      figure("start to ready, slowest", times.at(-1)!, "ms"),
    ],
    notes: [],
  };
}
