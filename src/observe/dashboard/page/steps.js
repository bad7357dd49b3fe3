/** The steps of a task's story, from what /internal/requests/{id} tells: some of it, where only the log is left. */

/**
 * @typedef {object} Story
 * @property {string} task_id
 * @property {string} tenant
 * @property {string} model
 * @property {string} tier
 * @property {string} state
 * @property {number} attempts
 * @property {string} created_at
 * @property {string} [queued_at]
 * @property {string} [deadline_at]
 * @property {{ id: string, size: number, reason: string, why?: string, worker: string, started_at?: string }} [batch]
 * @property {string} [settled_at]
 * @property {{ ok: boolean, code?: string, message?: string, output_bytes?: number }} [outcome]
 * @property {readonly { at: string, attempt?: number, worker?: string, message: string, dead?: boolean }[]} [failed_attempts]
 * @property {readonly { status: number, code?: string, work: string, arrived_at: string, answered_at: string }[]} [requests]
 * @property {string} [source]
 */

/** @typedef {{ at: number, what: string, more: string }} Step */

/** Those that are known, in their order. @param {Story} story @returns {Step[]} */
export function stepsOf(story) {
  const { batch, outcome } = story;
  /** @type {Step[]} */
  const steps = [];
  const add = (
    /** @type {string | undefined} */ at,
    /** @type {string} */ what,
    /** @type {string} */ more,
  ) => {
    if (at !== undefined) steps.push({ at: Date.parse(at), what, more });
  };
  const who = [story.tier, story.tenant === "" ? "" : `tenant ${story.tenant}`];
  add(story.created_at, "Arrived", who.filter((part) => part !== "").join(", "));
  add(story.queued_at, "Queued", story.attempts > 1 ? `for attempt ${story.attempts}` : "");
  for (const { at, attempt, worker, message, dead } of story.failed_attempts ?? []) {
    const where = [attempt === undefined ? "" : `attempt ${attempt}`, worker ?? ""].filter(
      (part) => part !== "",
    );
    add(at, dead === true ? "Given up" : "Failed, tried again", [...where, message].join(": "));
  }
  if (batch !== undefined) {
    add(
      batch.started_at,
      "Sent to a worker",
      `${batch.worker}, batch of ${batch.size}: ${batch.why || batch.reason}`,
    );
  }
  const failed = `${outcome?.code ?? ""} ${outcome?.message ?? ""}`.trim();
  const bytes = outcome?.output_bytes === undefined ? "" : `${outcome.output_bytes} bytes`;
  add(story.settled_at, outcome?.ok === true ? "Done" : "Failed", outcome?.ok === true ? bytes : failed);
  const own = (story.requests ?? []).find(({ work }) => work !== "joined");
  if (own !== undefined && own.status !== 202) {
    add(own.answered_at, "Answered", `${own.status}${own.code === undefined ? "" : ` ${own.code}`}`);
  }
  return steps.sort((a, b) => a.at - b.at);
}
