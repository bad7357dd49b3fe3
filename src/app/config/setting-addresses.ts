/**
 * The kinds of setting that name a place on the network: a listener, a server, a URL.
 *
 * As in `setting-kinds.ts`, `read` never throws and never repeats the value it was given.
 */
import { isIPv4, isIPv6 } from "node:net";
import type { Address } from "./config.ts";
import { leaf, type Leaf } from "./setting-kinds.ts";

/** Where a listener of ours goes. `shown`: only an example, and nowhere unless the file says so. */
export function address(doc: string, fallback: string, shown = false): Leaf<Address> {
  return leaf<Address>({
    kind: "host:port",
    doc,
    bounds: "port 0 to 65,535; 0 picks a free one",
    ...(!shown && { fallback: parseAddress(fallback), defaultText: fallback }),
    example: fallback,
    read({ value }) {
      const parsed = parseAddress(String(value));
      if (parsed !== undefined) return { value: parsed };
      return { wrong: "is not host:port; write one like 127.0.0.1:8080, [::1]:8080 or 0.0.0.0:8080" };
    },
  });
}

/** Another's listener; it has to have a port. */
export function server(doc: string, example: string): Leaf<Address> {
  return leaf<Address>({
    kind: "host:port",
    doc,
    bounds: "port 1 to 65,535",
    example,
    read({ value }) {
      const parsed = parseAddress(String(value));
      if (parsed !== undefined && parsed.port > 0) return { value: parsed };
      return { wrong: `is not host:port; write one like ${example} or [::1]:6379` };
    },
  });
}

const hostName =
  /^(?=.{1,253}$)[a-z\d_](?:[a-z\d_-]{0,62}[a-z\d_])?(?:\.[a-z\d_](?:[a-z\d_-]{0,62}[a-z\d_])?)*$/i;

export function parseAddress(written: string): Address | undefined {
  const match = /^(?:\[([^\]]+)\]|([^:[\]]+)):(\d{1,5})$/.exec(written);
  if (match === null) return undefined;
  const [, bracketed, plain = "", portText = ""] = match;
  const port = Number(portText);
  if (port > 65_535) return undefined;
  if (bracketed !== undefined) return isIPv6(bracketed) ? { host: bracketed, port } : undefined;
  const numeric = /^[\d.]+$/.test(plain);
  return (numeric ? isIPv4(plain) : hostName.test(plain)) ? { host: plain, port } : undefined;
}

/** A full URL. Credentials in it are refused: worker URLs are logged and shown. */
export function url(doc: string, schemes: readonly string[], example: string): Leaf<string> {
  return leaf<string>({
    kind: "URL",
    doc,
    bounds: schemes.join(" | "),
    example,
    read({ value }) {
      const parsed = URL.parse(String(value));
      // The parser drops line breaks and tabs without a word.
      const odd = /[\u0000- \u007f]/.test(String(value));
      if (parsed === null || parsed.hostname === "" || typeof value !== "string" || odd) {
        return { wrong: `is not a full URL; write one like ${example}` };
      }
      if (!schemes.includes(parsed.protocol.slice(0, -1))) {
        return { wrong: `must begin with ${schemes.map((scheme) => `${scheme}://`).join(" or ")}` };
      }
      if (parsed.username !== "" || parsed.password !== "") {
        return { wrong: "holds credentials, which would be logged with it; remove the part before the @" };
      }
      return { value: parsed.href };
    },
  });
}

/** A worker's URL, or a name of DNS that stands for several: `dns://NAME:PORT/…`, `dns+SCHEME://` for TLS. */
export function workerUrl(full: Leaf<string>, secure: "https" | "grpcs"): Leaf<string> {
  const schemes = ["dns", `dns+${secure}`];
  const name = url(full.doc, schemes, "dns://gpu.default.svc:9000");
  return {
    ...full,
    bounds: `${full.bounds} | ${schemes.join(" | ")}`,
    read(source) {
      if (!/^dns(?:\+[a-z]+)?:/i.test(String(source.value))) return full.read(source);
      const read = name.read(source);
      if ("wrong" in read) return read;
      const { protocol, hostname, port, pathname, search, hash } = new URL(read.value);
      if (!hostName.test(hostname) || /^[\d.]+$/.test(hostname)) {
        return { wrong: `does not name a host; write one like ${name.example}` };
      }
      if (hash !== "") return { wrong: "has a # in it, which no worker would see; remove it" };
      const place = `${hostname.toLowerCase()}${port === "" ? "" : `:${port}`}`;
      if (secure === "https") return { value: `${protocol}//${place}${pathname || "/"}${search}` };
      if (port === "") return { wrong: `names no port; write one like ${name.example}` };
      if (!/^\/?$/.test(pathname) || search !== "")
        return { wrong: `has something behind its port; write one like ${name.example}` };
      return { value: `${protocol}//${place}` };
    },
  };
}

/** `grpc://HOST:PORT`, `grpcs` for TLS; nothing behind it, since the service's path is fixed. */
export function grpcUrl(doc: string, example: string): Leaf<string> {
  const full = url(doc, ["grpc", "grpcs"], example);
  return {
    ...full,
    read(source) {
      const read = full.read(source);
      if ("wrong" in read) return read;
      const { port, pathname, search, hash, protocol, host } = new URL(read.value);
      if (port === "") return { wrong: `names no port; write one like ${example}` };
      if (!/^\/?$/.test(pathname) || search !== "" || hash !== "") {
        return { wrong: `has something behind its port; write one like ${example}` };
      }
      return { value: `${protocol}//${host}` };
    },
  };
}

/**
 * `redis://USER:PASSWORD@HOST:PORT/DB`, everything but the host optional; `rediss` for TLS. Credentials are
 * percent-encoded, as in every URL.
 */
export function redisUrl(doc: string, example: string): Leaf<string> {
  const form = "redis://USER:PASSWORD@HOST:PORT, or rediss:// for TLS";
  return leaf<string>({
    kind: "secret",
    doc,
    bounds: "redis | rediss",
    example,
    secret: true,
    read({ value }) {
      if (typeof value !== "string" || !/^[!-~]{1,2048}$/.test(value)) {
        return { wrong: `is not a URL of at most 2048 visible ASCII characters; write ${form}` };
      }
      if (!/^rediss?:\/\//i.test(value))
        return { wrong: `must begin with redis:// or rediss://; write ${form}` };
      const parsed = URL.parse(value);
      if (parsed === null || parsed.hostname === "" || parsed.port === "0") {
        return { wrong: `names no server; write ${form}, with %XX for special characters in the password` };
      }
      if (parsed.search !== "" || parsed.hash !== "") {
        return { wrong: "has options after ? or #, which are not read; use the settings beside it" };
      }
      if (!/^\/?\d{0,5}$/.test(parsed.pathname)) {
        return { wrong: "has a path that is no database number; write /0, or nothing, after the port" };
      }
      if (parsed.username !== "" && parsed.password === "") {
        return { wrong: "names a user without a password; write USER:PASSWORD@, or remove the user" };
      }
      return decodes(parsed.username) && decodes(parsed.password)
        ? { value }
        : { wrong: "holds a % in its user or password that begins no %XX; write %25 for a plain %" };
    },
  });
}

/** `postgres://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=…`; what follows the ? is the client's affair. */
export function postgresUrl(doc: string, example: string): Leaf<string> {
  const form = "postgres://USER:PASSWORD@HOST:PORT/DATABASE";
  return leaf<string>({
    kind: "secret",
    doc,
    bounds: "postgres | postgresql",
    example,
    secret: true,
    read({ value }) {
      if (typeof value !== "string" || !/^[!-~]{1,2048}$/.test(value)) {
        return { wrong: `is not a URL of at most 2048 visible ASCII characters; write ${form}` };
      }
      if (!/^postgres(ql)?:\/\//i.test(value)) return { wrong: `must begin with postgres://; write ${form}` };
      const parsed = URL.parse(value);
      if (parsed === null || parsed.hostname === "") {
        return { wrong: `names no server; write ${form}, with %XX for special characters in the password` };
      }
      return decodes(parsed.username) && decodes(parsed.password)
        ? { value }
        : { wrong: "holds a % in its user or password that begins no %XX; write %25 for a plain %" };
    },
  });
}

function decodes(encoded: string): boolean {
  try {
    decodeURIComponent(encoded);
    return true;
  } catch {
    return false;
  }
}

/** A path on a server, with its query if it has one. */
export function urlPath(doc: string, example: string): Leaf<string> {
  return leaf<string>({
    kind: "URL path",
    doc,
    bounds: "begins with /",
    example,
    read({ value }) {
      const fits = typeof value === "string" && /^\/[!-~]{0,511}$/.test(value) && !value.includes("#");
      return fits ? { value } : { wrong: `is not a path on the worker; write one like ${example}` };
    },
  });
}
