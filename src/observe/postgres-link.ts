/**
 * One connection to PostgreSQL, and its error messages. It lives until its first error and is never repaired; callers
 * open another. Each query has a time limit; after it the connection is destroyed, because replies could no longer be
 * matched. Statements are not named, so a pooler may sit between. Messages are our own and name only the server:
 * PostgreSQL's may quote a user, a value, a password.
 */
import { connect, type Socket } from "node:net";
import postgres from "postgres";
import type { Clock } from "../app/clock.ts";
import { SenderTrouble } from "./sender.ts";

export type SqlValue = string | number | null;
export type PostgresRow = Readonly<Record<string, unknown>>;

interface Dialled {
  readonly host: readonly string[];
  readonly port: readonly number[];
  readonly path: string | false | undefined;
}

export class PostgresLink {
  readonly #sql: postgres.Sql;
  readonly #clock: Clock;
  readonly #timeoutMs: number;
  readonly #sockets: Socket[] = [];
  /** Rejects the pending queries. */
  readonly #asking = new Set<(why: SenderTrouble) => void>();
  readonly #onDead: () => void;
  #dead = false;

  /** `onDead` is called once, whatever the cause. */
  constructor(url: string, timeoutMs: number, clock: Clock, onDead: () => void = () => {}) {
    this.#clock = clock;
    this.#onDead = onDead;
    this.#timeoutMs = timeoutMs;
    const options = {
      max: 1,
      prepare: false,
      fetch_types: false,
      idle_timeout: 0,
      max_lifetime: null,
      connect_timeout: Math.ceil(timeoutMs / 1000),
      connection: { application_name: "ferry" },
      onnotice: () => {},
      // We destroy the socket: the client only asks the server to close, and a stuck server does not.
      socket: (place: Dialled) => this.#dial(place),
    };
    this.#sql = postgres(url, options);
  }

  get dead(): boolean {
    return this.#dead;
  }

  /** Rejects with a `SenderTrouble`. Without values the text may hold several statements: one transaction. */
  async ask(
    text: string,
    values: SqlValue[] = [],
  ): Promise<readonly PostgresRow[] & { readonly count: number }> {
    if (this.#dead) throw new SenderTrouble("the connection is gone");
    const { promise: ended, reject: end } = Promise.withResolvers<never>();
    this.#asking.add(end);
    const alarm = this.#clock.at(this.#clock.now() + this.#timeoutMs, () =>
      this.destroy(new SenderTrouble(`no answer within ${this.#timeoutMs} ms`)),
    );
    try {
      return await Promise.race([this.#sql.unsafe<PostgresRow[]>(text, values), ended]);
    } catch (error) {
      const trouble = troubleOf(error);
      if (!trouble.ofTheData) this.destroy(trouble);
      throw trouble;
    } finally {
      this.#asking.delete(end);
      alarm.cancel();
    }
  }

  destroy(why = new SenderTrouble("the connection was closed")): void {
    if (this.#dead) return;
    this.#dead = true;
    for (const end of this.#asking) end(why);
    void this.#sql.end({ timeout: 0 });
    for (const socket of this.#sockets) socket.destroy();
    this.#onDead();
  }

  #dial({ host, port, path }: Dialled): Socket {
    if (this.#dead) throw new Error("the connection is gone");
    const tried = this.#sockets.length;
    const at = tried % host.length;
    const socket = typeof path === "string" ? connect(path) : connect(port[at]!, host[at]);
    this.#sockets.push(socket);
    socket.setNoDelay(true);
    // Several hosts are tried in turn, and the client would retry forever; until one is connected or all failed, the
    // end of a socket is the client's business.
    socket.once("error", (error) => {
      if (tried + 1 >= host.length) this.destroy(troubleOf(error));
    });
    socket.once("connect", () => socket.once("close", () => this.destroy()));
    // Where the client looks for the certificate's host name.
    return Object.assign(socket, { host: host[at] });
  }
}

const STATES: Readonly<Record<string, string>> = {
  "28000": "it refuses this user or this kind of connection",
  "28P01": "it refuses the user or the password of requestLog.url",
  "3D000": "the database of requestLog.url does not exist",
  "42501": "the user of requestLog.url lacks a right: to create tables in the schema, or on ferry_requests",
  "42P01": "the table ferry_requests is gone",
  "42703": "the table ferry_requests lacks a column",
  "53100": "its disk is full",
  "53300": "it has too many connections",
  "57014": "it cancelled the statement",
  "57P01": "it is shutting down",
  "57P03": "it is starting up",
  "25006": "it takes no writes: it is a replica",
};

function troubleOf(error: unknown): SenderTrouble {
  if (error instanceof SenderTrouble) return error;
  const code = error instanceof Error && "code" in error ? String(error.code) : "";
  if (error instanceof postgres.PostgresError)
    return new SenderTrouble(STATES[code] ?? `it answered with SQLSTATE ${code}`, { state: code });
  // Condition names, such as ECONNREFUSED or CERT_HAS_EXPIRED.
  return new SenderTrouble(/^[A-Z][A-Z_\d]{2,60}$/.test(code) ? code : "the connection failed");
}
