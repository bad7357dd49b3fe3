/**
 * Isolates the inputs that make a worker refuse a batch, by bisection under one lease.
 *
 * Pure: `nextStep` takes the last reply and returns the verdicts that follow and the next call. Every input gets
 * exactly one verdict, and none is blamed before it was sent alone. At most 2 + 2·⌈log2 n⌉ calls; what is not cleared
 * by then returns to the queue in smaller batches. A batch that fails at the worker is cut in two, and no further
 * unless one part is answered: if both fail, it is most likely the worker.
 */
import { hash } from "node:crypto";
import type { BatchTask, Reply } from "../workers/backend/backend.ts";
import type { Suspect } from "../core/blame.ts";
import type { Task } from "../core/task.ts";
import type { ClaimedTask } from "../engine/engine.ts";

/** An input as sent, and the tasks with that content. */
export interface BatchMember {
  readonly sent: BatchTask;
  readonly tasks: ClaimedTask[];
  /** Cached by `suspectOf`. */
  digest?: string;
}

/** Tasks with equal content are sent once. (Those of one tenant were joined at put.) */
export function membersOf(claimed: readonly ClaimedTask[]): BatchMember[] {
  const { tenant } = claimed[0]!.task;
  const oneTenant = claimed.every(({ task }) => task.tenant === tenant);
  const byContent = new Map<string, BatchMember>();
  const members: BatchMember[] = [];
  for (const each of claimed) {
    const { id, input, content } = each.task;
    const same = oneTenant || content === "" ? undefined : byContent.get(content);
    if (same !== undefined) {
      same.tasks.push(each);
      continue;
    }
    const member = { sent: { id, input }, tasks: [each] };
    members.push(member);
    if (!oneTenant && content !== "") byContent.set(content, member);
  }
  return members;
}

export function tenantOf({ tasks }: BatchMember): string {
  return tasks[0]!.task.tenant;
}

const MAX_KEY_CHARS = 256; // bound on the key of an input, whatever its parameters

/** For `core/blame.ts`; computed only after recent failures. */
export function suspectOf(member: BatchMember): Suspect {
  const { task } = member.tasks[0]!;
  const { content, tenant } = task;
  if (content !== "" && content.length <= MAX_KEY_CHARS) return { key: content, tenant };
  return { key: (member.digest ??= digestOf(task)), tenant };
}

/** Also for tasks that are not compared with others (`collapse: false`, or sampled): they may be sent again. */
function digestOf({ content, tenant, parameters, input }: Task): string {
  return hash("sha256", content === "" ? `${tenant}\n${parameters}\n${input}` : content, "base64url");
}

/** Whether some inputs may be answered if sent without the others. */
export function mayBeCut(reply: Reply): boolean {
  if (reply.kind === "failed") return reply.blame === "worker";
  return (reply.kind === "rejected" && reply.code === undefined) || reply.kind === "unusable";
}

interface Part<M> {
  readonly members: readonly M[];
  readonly firstHalf?: boolean; // first half of a refused part; the other half is next on the stack
  readonly again?: boolean; // was sent alone once without usable output, which may have been chance
}

export interface Bisection<M> {
  readonly size: number;
  /** A stack: the last part is sent next. */
  readonly parts: readonly Part<M>[];
  readonly asked?: Part<M> | undefined;
  /** Sent alone twice without usable output. */
  readonly unusable: readonly M[];
  /** Parts the worker failed before it answered any. */
  readonly failed: number;
  readonly answered: boolean;
  readonly callsLeft: number;
}

export interface StepView<M> {
  readonly takes: number;
  /** Inputs sent one by one until one is answered (`core/blame.ts`). */
  readonly suspected: (member: M) => boolean;
  /** `RetryBudget` allows a further call after the worker failed. */
  readonly mayCallAgain: boolean;
}

/**
 * Rulings on inputs:
 *   reply      as the last reply says
 *   putBack    not cleared within the calls: back to the queue, in smaller batches
 *   yield      back because the worker may not be called any more; no attempt is counted
 *   unusable   sent alone twice without usable output, by a worker that answered nothing of this batch
 *   guilty     the same, by a worker that answered others
 */
export interface Ruling<M> {
  readonly members: readonly M[];
  readonly as: "reply" | "putBack" | "yield" | "unusable" | "guilty";
}

export interface Step<M> {
  readonly state: Bisection<M>;
  readonly rulings: readonly Ruling<M>[];
  /** Undefined when every input has its ruling. */
  readonly call: readonly M[] | undefined;
}

/** Starts to cut a batch that was refused as a whole. A failed one may be due to one tenant's inputs. */
export function cut<M>(members: readonly M[], reply: Reply, tenant: (member: M) => string): Bisection<M> {
  const parts = reply.kind === "failed" ? partsByTenant(members, tenant) : halves(members);
  return { ...begin(members, parts), callsLeft: callsFor(members.length) - 1 };
}

export function sendApart<M>(members: readonly M[], answered: boolean): Bisection<M> {
  return { ...begin(members, [{ members }]), answered };
}

function begin<M>(members: readonly M[], parts: readonly Part<M>[]): Bisection<M> {
  const size = members.length;
  return { size, parts, unusable: [], failed: 0, answered: false, callsLeft: callsFor(size) };
}

function callsFor(size: number): number {
  return 2 + 2 * Math.ceil(Math.log2(size));
}

/** Reply to a call with `members`: those of the last step that could still be sent. */
export interface Replied<M> {
  readonly members: readonly M[];
  readonly reply: Reply;
}

/** `replied`: undefined if no call was made (first step, or none of the last step's inputs could be sent). */
export function nextStep<M>(
  state: Bisection<M>,
  replied: Replied<M> | undefined,
  view: StepView<M>,
): Step<M> {
  const rulings: Ruling<M>[] = [];
  const next = pick(replied === undefined ? state : afterReply(state, replied, view, rulings), view);
  if (next.asked !== undefined && next.callsLeft > 0)
    return { state: next, rulings, call: next.asked.members };
  const last = end(next, "putBack");
  return { ...last, rulings: [...rulings, ...last.rulings] };
}

/** Ends without a further call; what was not cleared is ruled `as`. */
export function end<M>(state: Bisection<M>, as: "putBack" | "yield"): Step<M> {
  const left = [...(state.asked?.members ?? []), ...allOf(state.parts)];
  const { unusable, answered } = state;
  const rulings: Ruling<M>[] = [
    { members: left, as },
    { members: unusable, as: answered ? "guilty" : "unusable" },
  ];
  return { state, rulings: rulings.filter(({ members }) => members.length > 0), call: undefined };
}

function afterReply<M>(
  state: Bisection<M>,
  { members, reply }: Replied<M>,
  view: StepView<M>,
  rulings: Ruling<M>[],
): Bisection<M> {
  const { parts, failed } = state;
  const answered = state.answered || reply.kind === "answered";
  const next = { ...state, answered, callsLeft: state.callsLeft - 1 };
  const rule = (ruled: readonly M[], as: Ruling<M>["as"] = "reply"): void => {
    if (ruled.length > 0) rulings.push({ members: ruled, as });
  };
  const ruleAll = (): Bisection<M> => {
    rule([...members, ...allOf(parts)]);
    return { ...next, parts: [] };
  };
  if (reply.kind === "answered") {
    rule(members);
    return state.asked!.firstHalf === true ? { ...next, parts: splitLast(parts) } : next;
  }
  if (reply.kind === "rejected" && reply.code !== undefined) return ruleAll();
  if (!mayBeCut(reply)) {
    rule(members);
    rule(allOf(parts), "putBack");
    return { ...next, parts: [] };
  }
  const suspected = view.suspected(members[0]!);
  if (reply.kind === "failed") {
    if (!view.mayCallAgain) return ruleAll();
    // Try the other part before looking closer. If that fails too, it is the worker.
    if (!answered && !suspected) {
      return failed === 1 ? ruleAll() : { ...next, parts: [{ members }, ...parts], failed: failed + 1 };
    }
  }
  if (members.length > 1) return { ...next, parts: [...parts, ...halves(members)] };
  if (reply.kind !== "unusable" || suspected) rule(members);
  else if (state.asked!.again === true) return { ...next, unusable: [...state.unusable, ...members] };
  else return { ...next, parts: [...parts, { members, again: true }] };
  return next;
}

/** Pops the next part, no larger than the worker takes. */
function pick<M>(state: Bisection<M>, { takes, suspected }: StepView<M>): Bisection<M> {
  const parts = [...state.parts];
  for (let part = parts.pop(); part !== undefined; part = parts.pop()) {
    const { members } = part;
    // The worker takes fewer than when the batch left, which may be all that was wrong.
    if (members.length > takes) parts.push(...halves(members));
    else if (members.length > 1 && suspected(members[0]!))
      parts.push({ members: members.slice(1) }, { members: members.slice(0, 1) });
    else return { ...state, parts, asked: part };
  }
  return { ...state, parts, asked: undefined };
}

function allOf<M>(parts: readonly Part<M>[]): M[] {
  return parts.flatMap(({ members }) => members);
}

/** Second half below, so that the first is sent first. */
function halves<M>(members: readonly M[]): Part<M>[] {
  const middle = members.length >> 1;
  return [{ members: members.slice(middle) }, { members: members.slice(0, middle), firstHalf: true }];
}

/** Separates the tenant with the most inputs; the others are sent first. */
function partsByTenant<M>(members: readonly M[], tenant: (member: M) => string): Part<M>[] {
  const byTenant = Map.groupBy(members, tenant);
  if (byTenant.size === 1) return halves(members);
  const most = [...byTenant.values()].reduce((one, other) => (other.length > one.length ? other : one));
  const others = members.filter((member) => !most.includes(member));
  return [{ members: most }, { members: others, firstHalf: true }];
}

/** The first half was answered, so the cause is in the other: skip sending that as a whole. */
function splitLast<M>(parts: readonly Part<M>[]): readonly Part<M>[] {
  const last = parts.at(-1);
  return last === undefined || last.members.length < 2
    ? parts
    : [...parts.slice(0, -1), ...halves(last.members)];
}
