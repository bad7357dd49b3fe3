/**
 * Keeps web pages away from a loopback listener without authentication.
 *
 * A page in a browser on the same machine can reach such a listener. It is recognized by headers that browsers add and
 * no page can change:
 *
 *   Host             not one of our names: DNS rebinding
 *   Sec-Fetch-Site   `cross-site` or `same-site`: sent with everything a page loads, images and frames included
 *   Origin           another site's, or `null`; decides alone in older browsers without Sec-Fetch-Site
 *
 * Programs send neither of the last two and use an address or localhost. A local proxy may pass other names:
 * `auth.allowedHosts`. Forwarding headers prove nothing: a page can send them too.
 */
import type { IncomingHttpHeaders } from "node:http";
import { isIP } from "node:net";
import { Refusal } from "../core/errors.ts";

/** Sent by our own origin, or typed in. */
const OWN_SITES: ReadonlySet<unknown> = new Set(["same-origin", "none"]);

export class PageGuard {
  readonly #names: ReadonlySet<string>;
  readonly #advice: string;
  /** Cache: the last Host that passed. */
  #known: string | undefined;

  /** `names`: host names beside localhost. `advice`: how to be admitted, for the message. */
  constructor(names: readonly string[], advice: string) {
    this.#names = new Set(names.map((name) => name.toLowerCase()));
    this.#advice = advice;
  }

  flaw({ host, origin, "sec-fetch-site": site }: IncomingHttpHeaders): Refusal | undefined {
    // HTTP/1.0 has no Host; no browser speaks it.
    if (host !== undefined && host !== this.#known) {
      if (!this.#ours(hostName(host))) {
        return this.#refusal(
          `the Host ${JSON.stringify(host.slice(0, 128))} is not a known name of this listener`,
        );
      }
      this.#known = host;
    }
    if (site === undefined ? origin === undefined : OWN_SITES.has(site)) return undefined;
    if (origin !== undefined && this.#ownOrigin(origin, host, site === undefined)) return undefined;
    return this.#refusal("requests from pages of other sites are refused");
  }

  #ours(name: string): boolean {
    return name === "localhost" || name.endsWith(".localhost") || isIP(name) !== 0 || this.#names.has(name);
  }

  #ownOrigin(origin: string, host: string | undefined, mayBeHost: boolean): boolean {
    if (!URL.canParse(origin)) return false;
    const url = new URL(origin);
    return (mayBeHost && url.host !== "" && url.host === host) || this.#names.has(hostName(url.host));
  }

  #refusal(what: string): Refusal {
    return new Refusal("FORBIDDEN", `${what}; ${this.#advice}`);
  }
}

function hostName(host: string): string {
  return host
    .toLowerCase()
    .replace(/:\d+$/, "")
    .replace(/\.$/, "")
    .replace(/^\[(.*)\]$/, "$1");
}
