/**
 * Who rides in a batch, and how a batch is cut when it was refused: in halves, until the guilty stand alone.
 */
import { hash } from "node:crypto";
import type { BatchTask, Reply } from "../workers/backend/backend.ts";
import type { Suspect } from "../core/blame.ts";
import type { Task } from "../core/task.ts";
import type { ClaimedTask, Verdict } from "../engine/engine.ts";

/** A task that is sent, and those of the same content that ride along with it. */
export interface Rider {
  readonly sent: BatchTask;
  readonly tasks: ClaimedTask[];
  /** Written by `suspectOf`. */
  digest?: string;
}

/** Tasks of the same content become one rider. Those of one tenant have joined before they came here. */
export function ride(claimed: readonly ClaimedTask[]): Rider[] {
  const { tenant } = claimed[0]!.task;
  if (claimed.every(({ task }) => task.tenant === tenant)) {
    return claimed.map((each) => ({ sent: toSend(each.task), tasks: [each] }));
  }
  const byContent = new Map<string, Rider>();
  const riders: Rider[] = [];
  for (const each of claimed) {
    const { content } = each.task;
    const same = content === "" ? undefined : byContent.get(content);
    if (same !== undefined) {
      same.tasks.push(each);
      continue;
    }
    const rider = { sent: toSend(each.task), tasks: [each] };
    riders.push(rider);
    if (content !== "") byContent.set(content, rider);
  }
  return riders;
}

/** As `core/blame.ts` knows it; made only where something failed of late. */
export function suspectOf(rider: Rider): Suspect {
  const { content, tenant } = rider.tasks[0]!.task;
  if (content !== "" && content.length <= MAX_KEY_CHARS) return { key: content, tenant };
  return { key: (rider.digest ??= digestOf(rider.tasks[0]!.task)), tenant };
}

/** What is remembered of an input is no longer than this, whatever its parameters are. */
const MAX_KEY_CHARS = 256;

/** Also of a task whose input is not compared with others (`collapse: false`, or drawn by lot): it may be sent again all the same. */
function digestOf({ content, tenant, parameters, input }: Task): string {
  return hash("sha256", content === "" ? `${tenant}\n${parameters}\n${input}` : content, "base64url");
}

function toSend({ id, input }: Task): BatchTask {
  return { id, input };
}

/** Who is sent at once, who after the others, and who is not sent. */
export interface Sorted {
  readonly first: Rider[];
  readonly apart: Rider[];
  readonly barred: Rider[];
}

/** Whether a part of the batch may be answered all the same. */
export function mayBeCut(reply: Reply): boolean {
  if (reply.kind === "failed") return reply.blame === "worker";
  return (reply.kind === "rejected" && reply.code === undefined) || reply.kind === "unusable";
}

/** Part of a batch that was refused. */
export interface Part {
  readonly riders: Rider[];
  /** Its other half is next on the pile. */
  readonly first: boolean;
  /** It was asked about alone and got no usable output, which may have been chance. */
  readonly again: boolean;
}

export function part(riders: Rider[]): Part {
  return { riders, first: false, again: false };
}

/** The second half below, so that the first is asked about first. */
export function halves(riders: Rider[]): Part[] {
  const middle = riders.length >> 1;
  return [
    { riders: riders.slice(middle), first: false, again: false },
    { riders: riders.slice(0, middle), first: true, again: false },
  ];
}

/**
 * The same of a batch that failed, and may have failed of one tenant's inputs: those of the one with the most of them are a
 * part of their own, and the others are asked about first.
 */
export function partsByTenant(riders: Rider[]): Part[] {
  const counts = new Map<string, number>();
  for (const { tasks } of riders) {
    const { tenant } = tasks[0]!.task;
    counts.set(tenant, (counts.get(tenant) ?? 0) + 1);
  }
  if (counts.size === 1) return halves(riders);
  const [most] = [...counts].sort(([, one], [, other]) => other - one)[0]!;
  const isMost = ({ tasks }: Rider): boolean => tasks[0]!.task.tenant === most;
  const others = riders.filter((rider) => !isMost(rider));
  return [part(riders.filter(isMost)), { riders: others, first: true, again: false }];
}

/** Its first half was good, so the guilty one is here: no need to ask about it as a whole. */
export function splitLast(suspects: Part[]): void {
  const guilty = suspects.at(-1);
  if (guilty === undefined || guilty.riders.length < 2) return;
  suspects.pop();
  suspects.push(...halves(guilty.riders));
}

export function allRiders(suspects: Part[]): Rider[][] {
  return suspects.map(({ riders }) => riders);
}

/** Back to the queue at once, through no fault of theirs. */
export function spared(
  tasks: readonly ClaimedTask[],
  at: number,
  message: string,
  more: { readonly unsent?: boolean; readonly overdue?: boolean },
): Verdict[] {
  return tasks.map(({ task }) => ({ id: task.id, kind: "retry", at, message, spared: true, ...more }));
}
