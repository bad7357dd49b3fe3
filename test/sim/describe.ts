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
  const where = plan.topology === "one" ? "one process" : plan.roles.join(", ");
  const kind = plan.journal ? `${where}, with a journal` : where;
  return [
    `seed ${seed}: ${kind}; ${plan.workers} workers of ${plan.baseMs} + ${plan.perTaskMs.toFixed(1)}n ms`,
    `  ${plan.requests} requests in ${plan.overMs} ms; ${limits.policy}, at most ${limits.maxBatchSize}, ` +
      `${rules.maxBatchTokens ?? "any"} tokens, ${rules.maxBatchBytes ?? "any"} bytes, by worker ${plan.takes.join(" ")}; ` +
      `pipeline ${rules.pipeline}${plan.queues ? " (workers queue)" : ""}; ` +
      `${limits.maxWaitMs} ms; admission ${plan.admission}; cache ${plan.cache}; collapse ${plan.collapse}`,
    `  queue ${plan.queueMs} ms, worker ${rules.workerMs} ms, total ${plan.totalMs} ms; ${retry.max} retries; ` +
      `at most ${plan.maxQueued} queued`,
    plan.topology === "cores"
      ? `  link: ${plan.link.latencyMs.toFixed(2)} ms, ${(100 * plan.link.pieces).toFixed(0)} % in pieces, ` +
        `${(100 * plan.link.slow).toFixed(1)} % up to ${plan.link.slowMs} ms late`
      : `  wire: ${rates(net)}`,
    `  workers: ${rates(gpu)}; poison ${(100 * plan.poison).toFixed(1)} %, killers ${(100 * plan.killer).toFixed(1)} %`,
    `  mishaps: ${plan.mishaps.map((mishap) => tell(mishap)).join(", ") || "none"}`,
    "",
  ].join("\n");
}

function tell(mishap: Mishap): string {
  const { kind, at, who, forMs } = mishap;
  const aim = "aim" in mishap ? ` with the next ${mishap.aim}` : "";
  if (kind === "cut") {
    const { afterBytes, atCore } = mishap;
    return `cut ${who + 1} at ${at.toFixed(0)} (${afterBytes} bytes ${atCore ? "from" : "to"} the core)`;
  }
  const whom =
    kind === "kill" ? ` gpu-${who + 1}` : kind === "clock-step" || kind === "store-away" ? "" : ` ${who + 1}`;
  return `${kind}${whom} at ${at.toFixed(0)}${aim} (${forMs} ms)`;
}
