/**
 * Overload refusals at minimal cost: the response bytes are written once the request's headers are parsed, without a
 * `ServerResponse` and without the body.
 *
 * At twice the load a process can handle, every second request is refused, at the expense of the others. Measured on
 * one core, 2 KB bodies, loopback: a handled request 50 µs, a refusal through `node:http` 20 µs, one here 13 µs, a C
 * program that only reads and writes 7 µs.
 *
 * Only for a POST with a short body of known length to a fixed path, with no response pending on its connection.
 * Everything else is refused on the usual path by the same rule (`Admission.turn`).
 */
import { STATUS_CODES, type IncomingMessage } from "node:http";
import type { Admission } from "./admission/admission.ts";
import type { Caller, Credentials } from "./admission/credentials.ts";
import type { Bottleneck } from "./admission/process-load.ts";
import type { Clock } from "../app/clock.ts";
import type { Events } from "../observe/events.ts";
import { type ErrorShape, renderRefusal } from "./exchange.ts";
import { newId } from "../engine/ids.ts";
import { JSON_TYPE } from "./reply.ts";

export interface WorkRoute {
  readonly path: string;
  readonly shape: ErrorShape | undefined;
}

export interface EarlyRefusalParts {
  readonly admission: Admission;
  readonly clock: Clock;
  readonly events: Events;
  readonly credentials: () => Credentials;
}

interface RefusalText {
  readonly before: string;
  readonly behind: string;
  readonly status: number;
}

/** A longer body is not read just to be discarded. */
const MAX_BODY_BYTES = 65_536;
const ANY_ID = "0".repeat(newId(0).length);

export class EarlyRefusals {
  readonly #parts: EarlyRefusalParts;
  readonly #texts = new WeakMap<WorkRoute, Map<string, RefusalText>>();

  constructor(parts: EarlyRefusalParts) {
    this.#parts = parts;
  }

  get active(): boolean {
    return this.#parts.admission.load.refusing;
  }

  /** The whole response, already counted; undefined: handle the request normally. */
  answer(request: IncomingMessage, route: WorkRoute): string | undefined {
    const { admission, events, clock } = this.#parts;
    const caller = this.#callerOf(request.rawHeaders);
    const bottleneck = caller && admission.load.refuses(caller.tier);
    if (caller === undefined || bottleneck === undefined) return undefined;
    const now = clock.now();
    const id = newId(now);
    const slot = admission.countBusy(caller);
    const { before, behind, status } = this.#text(route, caller.tier, bottleneck, slot);
    if (events.heard("request.answered")) {
      events.emit("request.answered", {
        id,
        method: "POST",
        route: route.path,
        model: admission.onlyModel,
        tier: admission.tierName(caller.tier),
        tenant: caller.tenant,
        status,
        code: "SERVICE_OVERLOADED",
        startedAt: now,
        latencyMs: 0,
        work: "own",
        ending: undefined,
        trace: undefined,
      });
    }
    return before + id + behind;
  }

  /** Undefined if the request does not qualify, or its caller is not known synchronously. */
  #callerOf(raw: readonly string[]): Caller | undefined {
    let hosts = 0;
    let authorization: string | undefined;
    let apiKey: string | undefined;
    for (let at = 0; at < raw.length; at += 2) {
      const value = raw[at + 1]!;
      switch (raw[at]!.length) {
        case 4:
          if (raw[at]!.toLowerCase() === "host") hosts++;
          break;
        case 6:
          if (raw[at]!.toLowerCase() === "expect") return undefined;
          break;
        case 9:
          if (raw[at]!.toLowerCase() !== "x-api-key") break;
          if (apiKey !== undefined) return undefined;
          apiKey = value;
          break;
        case 13:
          if (raw[at]!.toLowerCase() !== "authorization") break;
          if (authorization !== undefined) return undefined;
          authorization = value;
          break;
        case 14:
          if (raw[at]!.toLowerCase() === "content-length" && Number(value) > MAX_BODY_BYTES) return undefined;
          break;
        case 17:
          if (raw[at]!.toLowerCase() === "transfer-encoding") return undefined;
      }
    }
    if (hosts !== 1) return undefined;
    try {
      const caller = this.#parts.credentials().identify(authorization, apiKey);
      return caller instanceof Promise ? undefined : caller;
    } catch {
      return undefined;
    }
  }

  #text(route: WorkRoute, tier: number, bottleneck: Bottleneck, slot: number): RefusalText {
    let texts = this.#texts.get(route);
    if (texts === undefined) this.#texts.set(route, (texts = new Map()));
    const key = `${tier} ${bottleneck} ${slot}`;
    let text = texts.get(key);
    if (text === undefined) {
      const { status, body, headers } = renderRefusal(
        this.#parts.admission.busy(tier, bottleneck, slot),
        ANY_ID,
        route.shape,
      );
      const lines = [`HTTP/1.1 ${status} ${STATUS_CODES[status] ?? ""}`, `content-type: ${JSON_TYPE}`];
      lines.push(`content-length: ${Buffer.byteLength(body)}`);
      for (let at = 0; at < headers.length; at += 2) lines.push(`${headers[at]}: ${headers[at + 1]}`);
      // UTF-8 bytes as latin1 characters, since it is written as latin1.
      const whole = Buffer.from(`${lines.join("\r\n")}\r\n\r\n${body}`).toString("latin1");
      const [before = "", behind = ""] = whole.split(ANY_ID);
      texts.set(key, (text = { before, behind, status }));
    }
    return text;
  }
}
