/**
 * One seed of a model whose inputs differ in length, under load: the real engine, dispatcher and admission on virtual
 * time, with tiers, tenants, workers that are slow or die, and a reload of `lengths`. `overtaking.ts` sees from outside
 * who is overtaken and for how long.
 */
import { inputOf } from "../../src/cli/plan/lengths.ts";
import { Simulation } from "../../src/cli/plan/simulation.ts";
import type { CostKind } from "../../src/core/cost.ts";
import type { ModelRules } from "../../src/dispatch/model-rules.ts";
import type { Engine } from "../../src/engine/engine.ts";
import { Overtaking } from "./overtaking.ts";
import { Dice } from "./plan.ts";

const TIERS = 3;
const QUEUE_MS = 1000;
const LENGTHS = ["auto", "auto", "auto", [16, 64, 256, 1024], "off"] as const;

export interface LengthsRun {
  readonly seed: number;
  readonly tasks: number;
  /** Batches that were composed, and tasks that were overtaken. */
  readonly composed: number;
  readonly overtaken: number;
  /** As a share of the bound. */
  readonly longest: number;
  readonly failures: readonly string[];
}

export async function playLengths(seed: number): Promise<LengthsRun> {
  const dice = new Dice(seed * 7907 + 3);
  const kind: CostKind = dice.pick(["padded", "padded", "padded", "packed", "rows"]);
  const [baseMs, perRowMs] = [dice.between(1, 10), dice.share()];
  const perTokenMs = 0.02 * dice.share();
  const maxBatchSize = dice.pick([1, 4, 8, 20, 32]);
  const maxWaitMs = dice.between(0, 60);
  const workers = dice.between(1, 4);
  const tenants = dice.pick([1, 2, 40]);
  const calm = dice.chance(0.3);
  const failures: string[] = [];
  const fail = (what: string): void => void failures.push(`seed ${seed}: ${what}`);
  const rules: ModelRules = {
    name: "m",
    limits: { policy: dice.pick(["adaptive", "latency", "eco", "fixed"]), maxBatchSize, maxWaitMs },
    lengths: dice.pick(LENGTHS),
    queueMs: QUEUE_MS,
    pipeline: dice.pick([1, "auto", 2]),
    workerMs: 2000,
    retry: { max: 3, baseMs: 20, maxMs: 200, budget: 1 },
    health: { failures: 3, ejectMs: 200, maxEjectMs: 1000 },
  };
  const simulation = new Simulation({
    seed,
    timeouts: { queueMs: QUEUE_MS, totalMs: 4000 },
    rules,
    backend: {
      workers,
      baseMs,
      perItemMs: perRowMs,
      batchMs: (rows, longest, total) =>
        baseMs +
        rows * perRowMs +
        perTokenMs * (kind === "rows" ? 0 : kind === "packed" ? total : rows * longest),
      jitter: dice.some(0.5, 0.3),
      slowRate: calm ? 0 : dice.some(0.4, 0.1),
      slowFactor: dice.between(2, 8),
      errorRate: calm ? 0 : dice.some(0.3, 0.1),
    },
    admission: {
      mode: dice.pick(["predictive", "off"]),
      tiers: TIERS,
      targetUtilization: 0.7,
      lastTierDepth: 100,
      firstTierDepth: 500,
    },
  });
  const { engine, clock } = simulation;
  const overtaking = new Overtaking(TIERS);
  const open = new Map<string, string>();
  const verbs: Engine = engine;
  const claim = engine.claim.bind(engine);
  let [composed, tasks] = [0, 0];
  verbs.claim = async (request) => {
    const lease = await claim(request);
    if (lease.composed !== undefined) composed++;
    for (const { id, tier, forMs, boundMs } of overtaking.claimed(request, lease, clock.now()))
      fail(`${id} of tier ${tier} was overtaken for ${forMs.toFixed(1)} ms, of ${boundMs.toFixed(1)}`);
    return lease;
  };
  const settle = engine.settle.bind(engine);
  verbs.settle = (lease, verdicts) => {
    if (verdicts.some(({ kind: verdict }) => verdict === "retry")) overtaking.returned();
    return settle(lease, verdicts);
  };
  engine.watch({
    settled: ({ task, outcome }) => {
      overtaking.gone(task.id);
      const crossed = outcome?.ok === true && outcome.output !== task.input;
      if (crossed || !open.delete(task.id))
        fail(`${task.id} ${crossed ? "got another's output" : "ended twice"}`);
    },
  });
  // Between a half and twice what the workers could do with a usual batch.
  const usualMs = baseMs + maxBatchSize * (perRowMs + perTokenMs * (kind === "rows" ? 0 : 200));
  const perMs = ((0.5 + 1.5 * dice.share()) * workers * maxBatchSize) / usualMs;
  const overMs = Math.min(3000, 1500 / perMs);
  for (let at = dice.exponential(1 / perMs); at < overMs; at += dice.exponential(1 / perMs)) {
    const draw = dice.share();
    const length =
      draw < 0.5 ? dice.between(4, 16) : draw < 0.9 ? dice.between(20, 120) : dice.between(200, 900);
    const tier = dice.pick([0, 0, 1, 2, 2]);
    const tenant = `t${dice.upTo(tenants)}`;
    clock.at(simulation.startedAt + at, () => {
      const input = inputOf(length);
      const now = clock.now();
      if (simulation.gate.enter({ tier, tenant }, now) !== undefined) return;
      simulation.gate.queued({ tier, tenant }, now);
      const id = `task-${++tasks}`;
      const task = { id, tier, tenant, input, parameters: "", content: "", model: "m", createdAt: now };
      open.set(id, input);
      overtaking.put({ ...task, deadlineAt: now + 4000 });
      overtaking.queued(id);
      simulation.put({ ...task, deadlineAt: now + 4000 });
    });
  }
  if (dice.chance(0.3)) {
    clock.at(simulation.startedAt + dice.share() * overMs, () => {
      simulation.rules = { ...rules, lengths: dice.pick(LENGTHS) };
      simulation.dispatcher.wake();
    });
  }
  for (let left = calm ? 0 : dice.upTo(3); left > 0; left--) {
    const { name } = simulation.backend.workers[dice.upTo(workers)]!;
    const forMs = dice.between(1, 500);
    clock.at(simulation.startedAt + dice.share() * overMs, () => simulation.backend.kill(name, forMs));
  }
  await simulation.run(overMs + 10_000);
  simulation.stop();
  if (open.size > 0) fail(`${open.size} tasks have no end`);
  return { seed, tasks, composed, overtaken: overtaking.count, longest: overtaking.longest, failures };
}
