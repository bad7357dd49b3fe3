/**
 * Headers and paths of what is passed through: what goes on to a worker, and what comes back.
 *
 * Neither side learns what is between Ferry and the other: what concerns one connection (RFC 9110 §7.6.1, and what
 * `Connection` names) stays on it. Nor does a worker learn who the client is to Ferry: `Authorization` and `x-api-key`
 * are for Ferry, and cookies belong to the origin that a browser sees, which is Ferry's. A worker sets none either. Gateways
 * forward no gRPC metadata at all.
 */
import { Refusal } from "../core/errors.ts";

/** Of one connection, in either direction. */
const HOP: ReadonlySet<string> = new Set([
  "connection",
  "http2-settings",
  "keep-alive",
  "proxy-authenticate",
  "proxy-authentication-info",
  "proxy-authorization",
  "proxy-connection",
  "te",
  "trailer",
  "transfer-encoding",
  "upgrade",
]);

/** For Ferry alone, or written anew. */
const NOT_SENT: ReadonlySet<string> = new Set([
  ...HOP,
  "authorization",
  "content-length",
  "cookie",
  "expect",
  "host",
  "x-api-key",
]);

/**
 * What servers believe when their own proxy says it: who the client is and how it connected, and which URL, host or
 * method the request "really" has. The proxy next to a worker is Ferry, so from a client none of these goes on.
 * `x-forwarded-for` is written anew.
 */
const PROXY_CLAIM = new RegExp(
  `^(?:${[
    "forwarded|x-forward(?:ed)?(?:-.*)?",
    "x-original-.*|x-originating-.*|x-rewrite-.*|x-(?:http-)?method.*|x-host|x-http-host.*|x-script-name",
    "x-scheme|x-url-scheme|front-end-https|proxy",
    // x-real-ip, true-client-ip, cf-connecting-ip, fastly-client-ip, x-azure-clientip…
    "(?:.*-)?(?:client|socket)?ip(?:v6)?|(?:x-)?remote-.*",
    "cf-.*|x-envoy-.*|x-appengine-.*|x-arr-.*",
    "x-auth-request-.*|x-amzn-oidc-.*|x-goog-(?:authenticated|iap)-.*|x-ms-client-principal.*",
    "(?:x-)?ssl-.*|x-client-(?:cert|verify|dn).*",
  ].join("|")})$`,
);

/** About the worker's connection or origin, which is not the one that the client sees, or orders for a proxy before Ferry. */
const NOT_RETURNED: ReadonlySet<string> = new Set([
  ...HOP,
  "alt-svc",
  "clear-site-data",
  "nel",
  "public-key-pins",
  "report-to",
  "reporting-endpoints",
  "set-cookie",
  "set-cookie2",
  "strict-transport-security",
  "x-accel-redirect",
  "x-ferry-load",
  "x-lighttpd-send-file",
  "x-sendfile",
]);

/** What a worker is told: name, value, name, value… of both. */
export function sentOn(raw: readonly string[], more: readonly string[]): string[] {
  const own = new Set<string>();
  for (let at = 0; at < more.length; at += 2) own.add(more[at]!);
  // Behind WSGI and CGI `_` and `-` are the same: `content_length` would be read as the length of the body. As nginx
  // does by default, no name with `_` goes on.
  const dropped = (name: string): boolean =>
    name.includes("_") || NOT_SENT.has(name) || own.has(name) || PROXY_CLAIM.test(name);
  return [...kept(raw, dropped), ...more];
}

/** What the client is told. `bodiless`: an answer that never has a body must not announce one. */
export function sentBack(raw: readonly string[], bodiless: boolean): string[] {
  return kept(raw, (name) => NOT_RETURNED.has(name) || (bodiless && name === "content-length"));
}

function kept(raw: readonly string[], dropped: (name: string) => boolean): string[] {
  const listed = connectionNames(raw);
  const headers: string[] = [];
  for (let at = 0; at < raw.length; at += 2) {
    const name = raw[at]!.toLowerCase();
    // `:path` and the like are HTTP/2's way to write the first line.
    if (name.startsWith(":") || listed.has(name) || dropped(name)) continue;
    headers.push(name, raw[at + 1]!);
  }
  return headers;
}

/** Whatever `Connection` lists is about that connection alone. */
function connectionNames(raw: readonly string[]): ReadonlySet<string> {
  const names = new Set<string>();
  for (let at = 0; at < raw.length; at += 2) {
    if (raw[at]!.toLowerCase() !== "connection") continue;
    for (const name of raw[at + 1]!.split(",")) names.add(name.trim().toLowerCase());
  }
  return names;
}

const MAX_DECODINGS = 4;

/**
 * Throws a Refusal for a path that could lead out of the worker's base: with a segment `.` or `..`, however it is
 * escaped, with slashes of either kind, or with the parameters that some servers cut off (`..;x`); also with a `#`,
 * which no request has.
 */
export function checkPath(path: string, query = ""): void {
  if (!path.startsWith("/") || path.startsWith("//") || !/^[\x21\x22\x24-\xff]*$/.test(path + query))
    throw unclear();
  let form = path;
  for (let round = 0; round < MAX_DECODINGS; round++) {
    if (hasDots(form) || hasControl(form)) throw unclear();
    const next = form.replace(/%([0-9a-f]{2})/gi, (_, digits: string) =>
      String.fromCharCode(Number.parseInt(digits, 16)),
    );
    if (next === form) return;
    form = next;
  }
  throw unclear();
}

function hasDots(path: string): boolean {
  return path.split(/[/\\]/).some((segment) => /^\.{1,2}(?:;.*)?$/s.test(segment));
}

function hasControl(text: string): boolean {
  // oxlint-disable-next-line no-control-regex
  return /[\x00-\x1f\x7f]/.test(text);
}

function unclear(): Refusal {
  return new Refusal("INVALID_REQUEST", "write the path plainly, without . and .. or what stands for them");
}
