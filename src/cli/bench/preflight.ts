/**
 * One request before the load: whether anybody is there, and would take it.
 *
 * What a wrong call looks like (no credential, an unknown model, a path that is none) looks the same ten
 * thousand times a second, so it is asked once. That a server is full is no reason not to measure it.
 */
import type { Clock } from "../../app/clock.ts";
import { Connection, type Target } from "./connection.ts";
import type { Requests } from "./requests.ts";

export type Sign =
  | { readonly status: number; readonly error: string; readonly message: string }
  /** No answer: the system's word for it, "timeout", or "" for a connection that just ended. */
  | { readonly status: 0; readonly error: string; readonly message: "" };

export function preflight(
  target: Target,
  requests: Requests,
  timeoutMs: number,
  clock: Clock,
): Promise<Sign> {
  return new Promise((resolve) => {
    const connection = new Connection(target, {
      answered: (it) => end({ status: it.status, ...wordsOf(it.head) }),
      closed: (it) => end({ status: 0, error: it.error, message: "" }),
    });
    const alarm = clock.at(clock.now() + timeoutMs, () => end({ status: 0, error: "timeout", message: "" }));
    const end = (sign: Sign): void => {
      alarm.cancel();
      resolve(sign);
      connection.close();
    };
    connection.send(requests.next(0), requests.marker, clock.now());
  });
}

/** What a refusal says, from the first bytes of an answer; "" where it says nothing that we know. */
function wordsOf(head: string): { error: string; message: string } {
  const body = head.slice(head.indexOf("\r\n\r\n") + 4);
  const value = (name: string): string => {
    const text = new RegExp(`"${name}":("(?:[^"\\\\]|\\\\.)*")`).exec(body)?.[1];
    // Answers were read byte by byte; what was written beyond ASCII is not worth more here.
    return text === undefined ? "" : (JSON.parse(text) as string);
  };
  try {
    return { error: value("error"), message: value("message") };
  } catch {
    return { error: "", message: "" };
  }
}
