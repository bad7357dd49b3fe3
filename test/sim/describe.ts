/** What a seed stands for, in words. */
import { draw, type Mishap } from "./plan.ts";

export function describePlan(seed: number): string {
  const plan = draw(seed);
  const { rules, net, gpu } = plan;
  const { limits, retry } = rules;
  const rates = (faults: object): string =>
    Object.entries(faults)
      .filter(([name, rate]) => rate > 0 && name !== "slowFactor")
      .map(([name, rate]) => `${name} ${(100 * (rate as number)).toFixed(1)} %`)
      .join(", ") || "none";
  const kind = plan.fleet
    ? plan.roles.join(", ")
    : plan.journal
      ? "one process, with a journal"
      : "one process";
  return [
    `seed ${seed}: ${kind}; ${plan.workers} workers of ${plan.baseMs} + ${plan.perTaskMs.toFixed(1)}n ms`,
    `  ${plan.requests} requests in ${plan.overMs} ms; ${limits.policy}, at most ${limits.maxBatchSize}, ` +
      `${rules.maxBatchTokens ?? "any"} tokens, ${rules.maxBatchBytes ?? "any"} bytes, by worker ${plan.takes.join(" ")}; ` +
      `pipeline ${rules.pipeline}${plan.queues ? " (workers queue)" : ""}; ` +
      `${limits.maxWaitMs} ms; admission ${plan.admission}; cache ${plan.cache}; collapse ${plan.collapse}`,
    `  queue ${plan.queueMs} ms, worker ${rules.workerMs} ms, total ${plan.totalMs} ms; ${retry.max} retries; ` +
      `at most ${plan.maxQueued} queued`,
    `  wire: ${rates(net)}`,
    `  workers: ${rates(gpu)}; poison ${(100 * plan.poison).toFixed(1)} %, killers ${(100 * plan.killer).toFixed(1)} %`,
    `  mishaps: ${plan.mishaps.map((mishap) => tell(mishap)).join(", ") || "none"}`,
    "",
  ].join("\n");
}

function tell(mishap: Mishap): string {
  const { kind, at, who, forMs } = mishap;
  const aim = "aim" in mishap ? ` with the next ${mishap.aim}` : "";
  const whom =
    kind === "kill" ? ` gpu-${who + 1}` : kind === "clock-step" || kind === "store-away" ? "" : ` ${who + 1}`;
  return `${kind}${whom} at ${at.toFixed(0)}${aim} (${forMs} ms)`;
}
