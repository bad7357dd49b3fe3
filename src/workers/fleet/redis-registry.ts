/**
 * The registry in Redis: seven keys under one hash tag, two scripts, nothing to subscribe to.
 *
 * A member costs one script call per beat, in which the share rule runs on the server. Measured time there
 * (Redis 7.0, one core of a small machine) and size of the reply, which carries what every member says of
 * itself:
 *
 *    4 batchers,  4 gateways,  16 workers     0.1 ms      4 KB
 *    8 batchers,  4 gateways,  64 workers     0.2 ms     15 KB
 *   16 batchers, 32 gateways, 256 workers     0.7 ms     60 KB      7 % of the server at 96 beats a second
 *
 * A beat is never sent again by the client: each carries a number, and the script refuses one that a later
 * beat has overtaken. So a request that was given up but still lies in a socket can do no harm.
 */
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import type { RedisNodes } from "../../engine/redis/client/nodes.ts";
import type { Beat, BeatReply, Member, Registry } from "./registry.ts";

type Store = Pick<RedisNodes, "run">;
type Script = Parameters<Store["run"]>[1]["script"];
type StoreReply = Awaited<ReturnType<Store["run"]>>;

export interface RedisRegistryOptions {
  /** This member is dead when its last beat is this old. */
  readonly aliveMs: number;
  /** From a short name to a key of shard 0. */
  key(name: string): string;
  /** The registry's clock; the server's when left out, which only tests do not. */
  now?(): number;
}

const SHARD = 0;
const KEYS = ["beats", "members", "lists", "leases", "texts", "grace", "alive"];
const beatScript = load("beat");
const leaveScript = load("leave");

export class RedisRegistry implements Registry {
  readonly #store: Store;
  readonly #options: RedisRegistryOptions;
  readonly #keys: readonly string[];
  #beats = 0;

  constructor(store: Store, options: RedisRegistryOptions) {
    this.#store = store;
    this.#options = options;
    this.#keys = KEYS.map((name) => options.key(name));
  }

  async beat({ member, listed, held, releasing }: Beat): Promise<BeatReply> {
    const args = [
      member.id,
      this.#options.aliveMs,
      ++this.#beats,
      JSON.stringify(member),
      JSON.stringify(listed.map(({ model, leases }) => [model, leases])),
      JSON.stringify(held),
      JSON.stringify(releasing),
    ];
    const now = this.#options.now?.();
    if (now !== undefined) args.push(now);
    const reply = await this.#store.run(SHARD, { script: beatScript, keys: this.#keys, args });
    const [mine, giveBack, unheld, members] = list(reply);
    return {
      held: list(mine).map(text),
      giveBack: list(giveBack).map(text),
      unheld: list(unheld).map((pair) => {
        const [model, lease] = list(pair);
        return { model: text(model), lease: text(lease) };
      }),
      members: list(members).flatMap((row) => readMember(list(row))),
    };
  }

  async leave(id: string): Promise<void> {
    await this.#store.run(SHARD, { script: leaveScript, keys: this.#keys, args: [id] }, { resend: true });
  }
}

function load(name: string): Script {
  const source = readFileSync(new URL(`lua/${name}.lua`, import.meta.url), "utf8");
  return { name, source, sha: createHash("sha1").update(source).digest("hex") };
}

/** Another version of Ferry may have written it: what cannot be read is left out, not fatal. */
function readMember([id, ageMs, doc]: readonly StoreReply[]): Member[] {
  try {
    const said = JSON.parse(text(doc)) as Partial<Member>;
    const { zone = "", role = "batcher", version = "", models = [], workers = [], doors = [] } = said;
    const { orders = [] } = said;
    return [{ id: text(id), zone, role, version, models, workers, doors, orders, ageMs: Number(ageMs) }];
  } catch {
    return [];
  }
}

function list(reply: StoreReply | undefined): readonly StoreReply[] {
  if (!Array.isArray(reply)) throw new Error("the registry's script gave a reply of another shape");
  return reply;
}

function text(reply: StoreReply | undefined): string {
  return reply instanceof Buffer ? reply.toString() : String(reply);
}
