/**
 * Reload: rereads the config file and applies the changes as a whole, or none.
 *
 *   load → problems? → differences → what needs a restart? → prepare (may fail) → commit (one step, cannot fail) | abandon
 *
 * One at a time: a second request waits and then reads the file. Problems are reported all at once.
 */
import { diffConfigs } from "./config/diff.ts";
import { formatProblems, type Loaded } from "./config/load.ts";
import type { Config } from "./config/config.ts";
import { Refusal } from "../core/errors.ts";
import type { Exchange } from "../gateway/exchange.ts";
import type { Prepared } from "../workers/pool.ts";
import { newId } from "../engine/ids.ts";
import type { Routes } from "../gateway/server.ts";

export const NO_FILE = "there is no config file to read again; start Ferry with -c FILE";

/** Lines to show; never a secret. */
export type Reloaded =
  | { readonly changed: readonly string[]; readonly problems?: undefined }
  | { readonly problems: readonly string[]; readonly changed?: undefined };

export interface ReloadParts {
  load(): Loaded;
  /** Rejects with one line, and then has changed nothing. */
  apply(next: Config): Promise<void>;
  tell(level: "info" | "warn", message: string): void;
}

export class Reloader {
  readonly #parts: ReloadParts;
  #config: Config;
  #last: Promise<unknown> = Promise.resolve();

  constructor(config: Config, parts: ReloadParts) {
    this.#config = config;
    this.#parts = parts;
  }

  get config(): Config {
    return this.#config;
  }

  /** Never rejects. */
  reload(): Promise<Reloaded> {
    const next = this.#last.then(() => this.#reload());
    this.#last = next;
    return next;
  }

  async #reload(): Promise<Reloaded> {
    let loaded: Loaded;
    try {
      loaded = this.#parts.load();
    } catch (error) {
      return this.#refuse([wordsOf(error)]);
    }
    if (loaded.problems !== undefined) return this.#refuse(linesOf(loaded.problems));
    const { changed, needRestart } = diffConfigs(this.#config, loaded.config);
    if (needRestart.length > 0) {
      const how = "needs a restart; restart Ferry, or take this change back";
      return this.#refuse(needRestart.map((each) => `${each}: ${how}`));
    }
    try {
      await this.#parts.apply(loaded.config);
    } catch (error) {
      return this.#refuse([wordsOf(error)]);
    }
    this.#config = loaded.config;
    const what = changed.length === 0 ? "nothing in it changed" : changed.join("; ");
    this.#parts.tell("info", `the config was read again: ${what}`);
    for (const each of linesOf(loaded.warnings)) this.#parts.tell("warn", each);
    return { changed };
  }

  #refuse(problems: readonly string[]): Reloaded {
    for (const each of problems) {
      this.#parts.tell("warn", `the config was read again and nothing was changed: ${each}`);
    }
    return { problems };
  }
}

function wordsOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

function linesOf(problems: Parameters<typeof formatProblems>[0]): string[] {
  return problems.flatMap((each) => formatProblems([each]).trimEnd());
}

/** `POST /internal/reload`; `asked()` is undefined without a config file. */
export function reloadRoutes(asked: () => (() => Promise<Reloaded>) | undefined): Routes {
  const reload = async (exchange: Exchange): Promise<void> => {
    const act = asked();
    if (act === undefined) throw new Refusal("INVALID_REQUEST", NO_FILE);
    const { changed, problems } = await act();
    if (changed !== undefined) return exchange.send(200, JSON.stringify({ changed }));
    const count = problems.length === 1 ? "1 problem" : `${problems.length} problems`;
    const message = `${count}, nothing was changed`;
    const body = { error: "INVALID_REQUEST", message, request_id: newId(exchange.startedAt), problems };
    exchange.send(422, JSON.stringify(body));
  };
  return { "/internal/reload": { POST: reload } };
}

export interface Change {
  /** Rejects, and changes nothing, if Ferry is stopping. */
  commit(): Promise<void>;
  /** Ends what was prepared. No effect after a commit or an abandon. */
  abandon(): Promise<void>;
}

/** Runs `steps` in order; if one fails, rejects with one line and changes nothing. `commit` must not fail. */
export async function prepareChange(
  steps: readonly (() => Promise<Prepared>)[],
  stopping: () => boolean,
  commit: (prepared: readonly Prepared[]) => void,
): Promise<Change> {
  const prepared: Prepared[] = [];
  let decided = false;
  const abandon = async (): Promise<void> => {
    if (decided) return;
    decided = true;
    await Promise.all(prepared.map((each) => each.abandon()));
  };
  const checkRuns = (): void => {
    if (stopping()) throw new Error("Ferry is being stopped");
  };
  const orAbandon = async (act: () => Promise<void>): Promise<void> => {
    try {
      await act();
      checkRuns();
    } catch (error) {
      await abandon();
      throw error;
    }
  };
  await orAbandon(async () => {
    for (const step of steps) prepared.push(await step());
  });
  return {
    abandon,
    commit: async () => {
      await orAbandon(async () => checkRuns());
      if (decided) return;
      decided = true;
      commit(prepared);
    },
  };
}
