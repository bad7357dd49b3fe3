/** The thread of `sender.ts`: serves requests concurrently and holds only connections, no unwritten data. */
import { parentPort } from "node:worker_threads";
import { SystemClock } from "../app/clock.ts";
import { PostgresLink } from "./postgres-link.ts";
import { deleteOld, findRows, insertRows, migrate, updateEndings } from "./request-log-schema.ts";
import {
  type SenderAnswer,
  type OtlpStart,
  type SenderQuestion,
  SenderTrouble,
  type Verb,
  type Verbs,
} from "./sender.ts";
import type { Collector, SpanFacts } from "./span-buffer.ts";

interface Store {
  readonly link: PostgresLink;
  readonly ended: Promise<void>;
}

const clock = new SystemClock();
const stores = new Map<number, Store>();
let collector: Promise<Collector> | undefined;

const answers: { readonly [Asked in Verb]: (given: Verbs[Asked][0]) => Promise<Verbs[Asked][1]> } = {
  openRows: async ({ store, url, timeoutMs }) => {
    const { promise: ended, resolve: end } = Promise.withResolvers<void>();
    const link = linkTo(url, timeoutMs, end);
    stores.set(store, { link, ended });
    void ended.then(() => stores.delete(store));
    await migrate(link);
  },
  insertRows: async ({ store, ...bundle }) => insertRows(linkOf(store), bundle),
  updateRows: async ({ store, ...bundle }) => updateEndings(linkOf(store), bundle),
  deleteOldRows: async ({ store, days, max }) => deleteOld(linkOf(store), days, max),
  findRows: async ({ store, id, max }) => findRows(linkOf(store), id, max),
  rowsEnd: async ({ store }) => stores.get(store)?.ended,
  closeRows: async ({ store }) => stores.get(store)?.link.destroy(),
  deliverSpans: async ({ start, spans }) => {
    const open = await (collector ??= openCollector(start));
    return open.deliver(JSON.parse(spans) as SpanFacts[]);
  },
  closeSpans: async () => (await collector)?.close(),
};

function linkTo(url: string, timeoutMs: number, end: () => void): PostgresLink {
  try {
    return new PostgresLink(url, timeoutMs, clock, end);
  } catch {
    // Our own message: the client's may quote the URL, and with it a password.
    throw new SenderTrouble("requestLog.url cannot be used");
  }
}

function linkOf(store: number): PostgresLink {
  const found = stores.get(store);
  if (found === undefined) throw new SenderTrouble("the connection is gone");
  return found.link;
}

async function openCollector({ about, version, ...rules }: OtlpStart): Promise<Collector> {
  return (await import("./otlp.ts")).openOtlp(rules, about, version);
}

async function answer({ number, verb, given }: SenderQuestion): Promise<SenderAnswer> {
  try {
    return { number, value: await (answers[verb] as (given: unknown) => Promise<unknown>)(given) };
  } catch (error) {
    const state = error instanceof SenderTrouble ? error.state : "";
    return { number, trouble: error instanceof Error ? error.message : String(error), state };
  }
}

parentPort!.on("message", (question: SenderQuestion) => {
  void answer(question).then((answered) => parentPort!.postMessage(answered));
});
