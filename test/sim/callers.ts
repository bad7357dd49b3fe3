/**
 * Those who ask: each with one request, its own patience and its own habits.
 *
 * Some hold the line, some wait a little and poll, some poll from the start, at any gateway; some hang up, some
 * cancel; some carry an Idempotency-Key and come again with it when they got no answer. Each knows what its answer
 * must be, and holds Ferry to what it was told: an id that was accepted is known from then on, an end is an end.
 */
import { Random } from "../../src/core/random.ts";
import type { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { ANSWER_WITHIN_MS, HOLD_MS } from "../../src/engine/remote/engine.ts";
import { type Answer, Talk } from "./exchange.ts";
import { answerTo } from "./gpu.ts";
import type { Ledger } from "./ledger.ts";
import { COMMAND_TIMEOUT_MS, type Dice, MODEL, type Plan } from "./plan.ts";
import type { Process } from "./process.ts";

type Habit = "hold" | "wait" | "poll" | "leave" | "cancel";

interface Wish {
  readonly name: string;
  readonly who: string;
  readonly input: string;
  readonly parameters: string;
  readonly key: string | undefined;
  readonly habit: Habit;
  tries: number;
}

const TRIES = 4;
const POLLS = 60;
/** A held caller is told by its gateway's own clock; calls to the store that fail come on top. */
const GRACE_MS = 4 * COMMAND_TIMEOUT_MS + 50;

type Asked = ConstructorParameters<typeof Talk>[1];

export class Callers {
  readonly #plan: Plan;
  readonly #time: VirtualClock;
  readonly #dice: Dice;
  readonly #ledger: Ledger;
  readonly #gateways: () => Process[];
  readonly #tenants: readonly string[];
  /** Where the last burst went. */
  #burst: Process | undefined;
  /** Requests that are not over. */
  open = 0;
  /** The end that was told first, by task id. */
  readonly #told = new Map<string, string>();
  /** The task that succeeded, by key. */
  readonly #byKey = new Map<string, string>();
  /** Of these nobody knows whether they were deleted: the answer did not come. */
  readonly #deleting = new Set<string>();
  /** Accepted ids, with whose they are and what they must become. */
  readonly ids = new Map<string, Wish>();

  constructor(plan: Plan, time: VirtualClock, dice: Dice, ledger: Ledger, gateways: () => Process[]) {
    this.#plan = plan;
    this.#time = time;
    this.#dice = dice;
    this.#ledger = ledger;
    this.#gateways = gateways;
    const { tenants } = plan.shape ?? { tenants: 3 };
    this.#tenants = Array.from({ length: tenants }, (_, at) => (at < 3 ? "abc"[at]! : `t${at}`));
  }

  /** One more comes now. */
  arrive(at: number): void {
    const dice = this.#dice;
    const roll = dice.share();
    const kind =
      roll < this.#plan.poison ? "poison" : roll < this.#plan.poison + this.#plan.killer ? "killer" : "plain";
    const key = dice.chance(0.15) ? `key-${dice.upTo(5)}` : undefined;
    const shared = dice.chance(0.25);
    // A key stands for one body, most of the time.
    const own = key !== undefined && dice.chance(0.85) ? `${kind}-${key}` : `${kind}-${at}`;
    const text = shared ? `${kind}-s${dice.upTo(4)}` : own;
    const wish: Wish = {
      name: `r${at + 1}`,
      who: `${dice.pick(this.#tenants)} ${dice.upTo(3)}`,
      input: JSON.stringify(text + this.#padding(text)),
      parameters: dice.chance(0.15) ? `{"p":${dice.upTo(2)}}` : "",
      key,
      habit: dice.pick(["hold", "hold", "hold", "hold", "wait", "poll", "poll", "leave", "cancel"]),
      tries: 0,
    };
    this.open++;
    this.#ledger.count("requests");
    this.#ask(wish, this.#gatewayOf(at));
  }

  /** The same text has the same length. Half are short, a tenth are as long as the longest. */
  #padding(text: string): string {
    const { shape } = this.#plan;
    if (shape === undefined) return "";
    const draw = new Random(hashOf(text)).next();
    const share = draw < 0.5 ? 0 : draw < 0.9 ? (draw - 0.5) / 2 : 0.5 + 5 * (draw - 0.9);
    return "-".repeat(Math.floor(4 * share * shape.longest));
  }

  #over(): void {
    this.open--;
  }

  #gateway(): Process | undefined {
    const open = this.#gateways();
    return open.length === 0 ? undefined : this.#dice.pick(open);
  }

  /** For a new request; a burst comes to one. */
  #gatewayOf(at: number): Process | undefined {
    const { burst } = this.#plan;
    const last = this.#burst;
    if (burst > 1 && last?.open === true && at % burst !== 0) return last;
    return (this.#burst = this.#gateway());
  }

  /** Tries again later, if it is somebody who does. */
  #again(wish: Wish, why: string): void {
    this.#ledger.count(`caller: ${why}`);
    const mayRepeat = wish.key !== undefined || this.#dice.chance(0.3);
    if (++wish.tries >= TRIES || !mayRepeat) return this.#over();
    this.#ledger.count("caller came again");
    this.#time.at(this.#time.now() + 20 + this.#dice.share() * 400, () => this.#ask(wish));
  }

  #ask(wish: Wish, gateway = this.#gateway()): void {
    if (gateway === undefined) return this.#again(wish, "no gateway");
    const { habit, key } = wish;
    const prefer = habit === "wait" ? `wait=${(this.#dice.share() * 0.3).toFixed(2)}` : "respond-async";
    const waits = habit === "hold" || habit === "leave";
    const parameters = wish.parameters === "" ? "" : `,"parameters":${wish.parameters}`;
    const asked = {
      method: "POST",
      headers: {
        authorization: wish.who,
        ...(!waits && { prefer }),
        ...(key !== undefined && { "idempotency-key": key }),
      },
      text: `{"model":"${MODEL}","input":${wish.input}${parameters}}`,
    };
    const talk = this.#say(gateway, "/v1/inference", "", asked, (answer) => {
      if (answer === undefined) return this.#again(wish, "connection lost");
      this.#answered(wish, answer, gateway);
    });
    if (habit !== "leave") return;
    this.#time.at(this.#time.now() + this.#dice.share() * this.#plan.totalMs * 0.5, () => {
      gateway.host.deliver(0, () => {
        if (talk.answered) return;
        this.#ledger.count("caller hung up");
        talk.leave();
        this.#over();
      });
    });
  }

  /** One exchange with a gateway; `undefined` when it dies before the answer. */
  #say(
    gateway: Process,
    route: string,
    id: string,
    asked: Asked,
    take: (answer: Answer | undefined) => void,
  ): Talk {
    const { host } = gateway;
    const startedAt = this.#time.now();
    const pausedMs = host.pausedMs;
    const died = (): void => {
      if (talk.answered) return;
      talk.answered = true;
      take(undefined);
    };
    const talk = new Talk(host, asked, (answer) => {
      host.onDeath.delete(died);
      const tookMs = this.#time.now() - startedAt - (host.pausedMs - pausedMs);
      const waitMs = asked.method === "POST" ? this.#plan.totalMs : 2000;
      const patience = waitMs + this.#graceMs(startedAt, asked, answer);
      this.#ledger.check(tookMs <= patience, `an answer took ${tookMs.toFixed(0)} ms of ${patience}`);
      take(answer);
    });
    host.onDeath.add(died);
    host.deliver(0.2, () => {
      void gateway
        .serve(route, asked.method, talk, id)
        .catch((error: unknown) => this.#ledger.fail(error as Error));
    });
    return talk;
  }

  /**
   * What a core that is away or hangs may cost. A put ends with its task's deadline; what is asked before it (the rate) and
   * after it (the task that it joined) is given up in time.
   */
  #graceMs(startedAt: number, { method, headers }: Asked, { body }: Answer): number {
    const { topology, totalMs, perUserPerMinute, collapse, journal } = this.#plan;
    if (topology !== "cores") return GRACE_MS;
    const ledger = this.#ledger;
    const joins = collapse || headers["idempotency-key"] !== undefined;
    const questions = method === "POST" ? (perUserPerMinute === undefined ? 0 : 1) + (joins ? 1 : 0) : 2;
    const awayMs = ledger.troubleMs(startedAt, "away");
    const hangsMs = ledger.troubleMs(startedAt, "hangs");
    // Each loss of the connection begins anew.
    const holds = questions + Math.max(1, ledger.losses(startedAt));
    const heldMs = ledger.linkMs + Math.min(awayMs + hangsMs, holds * HOLD_MS);
    // A full disk lets a put wait, as long as its task may.
    const refused = method === "POST" && !journal && hangsMs === 0 && body.includes("(it is away)");
    if (refused) return heldMs - totalMs;
    return heldMs + Math.min(hangsMs, questions * ANSWER_WITHIN_MS);
  }

  #answered(wish: Wish, { status, body }: Answer, gateway: Process): void {
    const said = JSON.parse(body) as {
      task_id?: string;
      status?: string;
      error?: string;
      request_id?: string;
    };
    this.#ledger.count(`answer ${status} ${said.error ?? ""}`);
    const id = said.task_id ?? said.request_id ?? "";
    this.#ledger.say(
      wish.name,
      `${status} ${said.error ?? said.status ?? ""} ${id && this.#ledger.name(id)}`,
    );
    if (status === 202) {
      this.ids.set(id, wish);
      if (wish.habit === "cancel") {
        this.#time.at(this.#time.now() + this.#dice.share() * 200, () => this.#cancel(wish, id));
      } else this.#poll(wish, id, POLLS);
      return;
    }
    if (status === 200) this.#ended(wish, id, body);
    if (status === 504 && body.includes("total timeout")) this.#ledger.gaveUp(id, gateway.host);
    if (status === 500) this.#ledger.check(false, `500 to ${wish.name}: ${body}`);
    if (status === 503 || status === 429 || status === 504) return this.#again(wish, `answer ${status}`);
    this.#over();
  }

  /** An end that was told: it is its own, and the same as ever. */
  #ended(wish: Wish, id: string, body: string): void {
    const said = JSON.parse(body) as { status: string; output?: unknown; error?: string };
    const ledger = this.#ledger;
    const what = said.status === "SUCCESS" ? JSON.stringify(said.output) : (said.error ?? said.status);
    if (said.status === "SUCCESS") {
      const own = answerTo(wish.input, wish.parameters);
      ledger.check(what === own, `${wish.name} asked ${wish.input} and was answered ${what}`);
      if (wish.key !== undefined && !ledger.anew.has(id)) this.#keyed(wish, id);
    }
    const before = this.#told.get(id);
    if (ledger.anew.has(id)) return;
    ledger.check(
      before === undefined || before === what,
      `${ledger.name(id)} was ${before}, and then ${what}`,
    );
    this.#told.set(id, what);
  }

  /** Under one key one task succeeds. */
  #keyed(wish: Wish, id: string): void {
    const key = `${wish.key} ${wish.who.split(" ")[0]}`;
    const before = this.#byKey.get(key);
    const same = before === undefined || before === id || this.#gone(before) || this.#gone(id);
    this.#ledger.check(
      same,
      `${key} ran as ${this.#ledger.name(before ?? "")} and as ${this.#ledger.name(id)}`,
    );
    if (before === id) this.#ledger.count("key came again, answered once");
    this.#byKey.set(key, id);
  }

  #gone(id: string): boolean {
    const { forgotten, anew, deleting } = this.#ledger;
    // Several may delete one task: of a core it is known who has asked.
    const deleted = this.#plan.topology === "cores" ? deleting : this.#deleting;
    return forgotten.has(id) || anew.has(id) || deleted.has(id);
  }

  #cancel(wish: Wish, id: string): void {
    const gateway = this.#gateway();
    if (gateway === undefined) return this.#poll(wish, id, POLLS);
    const asked = { method: "DELETE", headers: { authorization: wish.who } };
    this.#deleting.add(id);
    this.#say(gateway, "/v1/result/{id}", id, asked, (answer) => {
      this.#ledger.count(`cancel answered ${answer?.status ?? "nothing"}`);
      if (answer?.status === 200) this.#ended(wish, id, answer.body);
      if (answer?.status === 204) return this.#over();
      if (answer !== undefined && answer.status !== 503) this.#deleting.delete(id);
      this.#poll(wish, id, POLLS);
    });
  }

  /** Asks until the end is known, now here, now there. */
  #poll(wish: Wish, id: string, left: number): void {
    const later = (): void => {
      if (left === 0) this.#ledger.check(false, `${wish.name} polled for ever`);
      if (left === 0) return this.#over();
      this.#time.at(this.#time.now() + 20 + this.#dice.share() * 400, () => this.#poll(wish, id, left - 1));
    };
    const gateway = this.#gateway();
    if (gateway === undefined) return later();
    this.look(wish, id, gateway, (done) => (done ? this.#over() : later()));
  }

  /** One question after a task; `true` when its end is known. */
  look(wish: Wish, id: string, gateway: Process, then: (done: boolean) => void): void {
    const query = this.#dice.chance(0.5) ? `wait=${(this.#dice.share() * 1.5).toFixed(2)}` : "";
    const asked = { method: "GET", headers: { authorization: wish.who }, query };
    this.#say(gateway, "/v1/result/{id}", id, asked, (answer) => {
      if (answer === undefined || answer.status === 503) return then(false);
      if (answer.status === 404) {
        const gone = this.#plan.evictAfterRead || this.#gone(id);
        this.#ledger.check(gone, `${this.#ledger.name(id)} was accepted, and is unknown`);
        return then(true);
      }
      const pending = answer.status !== 200 || answer.body.includes('"PENDING"');
      if (!pending) this.#ended(wish, id, answer.body);
      then(!pending);
    });
  }
}

function hashOf(text: string): number {
  let hash = 7;
  for (let at = 0; at < text.length; at++) hash = (hash * 31 + text.charCodeAt(at)) % 1_000_003;
  return hash;
}
