/**
 * The page's files: `/` and `/assets/NAME`. They hold no data and need no token; the data come from /internal/live,
 * which does. Each file is read and compressed once, on first request. Browsers revalidate every time (ETag, 304), so
 * versions never mix. The content security policy forbids other hosts.
 */
import { hash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { extname } from "node:path";
import { gzipSync } from "node:zlib";
import { Refusal } from "../../core/errors.ts";
import type { Exchange } from "../../gateway/exchange.ts";
import type { Routes } from "../../gateway/server.ts";

const TYPES: Readonly<Record<string, string>> = {
  ".html": "text/html; charset=utf-8",
  ".css": "text/css; charset=utf-8",
  ".js": "text/javascript; charset=utf-8",
  ".svg": "image/svg+xml",
};

/** From the package: the name that the page uses → the file. */
const CHARTS: Readonly<Record<string, string>> = {
  "uplot.js": "uplot/dist/uPlot.iife.min.js",
  "uplot.css": "uplot/dist/uPlot.min.css",
};

const POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const SAFETY: readonly string[] = Object.entries({
  "content-security-policy": POLICY,
  "x-content-type-options": "nosniff",
  "referrer-policy": "no-referrer",
  "x-frame-options": "DENY",
  "cross-origin-opener-policy": "same-origin",
  vary: "accept-encoding",
}).flat();

export interface Asset {
  readonly type: string;
  readonly bytes: Buffer;
  readonly gzipped: Buffer;
  readonly etag: string;
}

export function findAssets(): ReadonlyMap<string, () => Asset> {
  const folder = new URL("./page/", import.meta.url);
  const own = readdirSync(folder).filter((name) => TYPES[extname(name)] !== undefined);
  const found = new Map(own.map((name) => [name, reader(name, () => new URL(name, folder))]));
  for (const [name, from] of Object.entries(CHARTS)) {
    found.set(
      name,
      reader(name, () => new URL(import.meta.resolve(from))),
    );
  }
  return found;
}

function reader(name: string, url: () => URL): () => Asset {
  let read: Asset | undefined;
  return () => (read ??= asset(name, readFileSync(url())));
}

function asset(name: string, bytes: Buffer): Asset {
  const etag = `"${hash("sha256", bytes, "base64url").slice(0, 22)}"`;
  return { type: TYPES[extname(name)]!, bytes, gzipped: gzipSync(bytes, { level: 9 }), etag };
}

export function assetRoutes(assets = findAssets()): Routes {
  const give = (exchange: Exchange, name: string): void => {
    const read = assets.get(name);
    if (read === undefined) throw new Refusal("NOT_FOUND", "the dashboard has no such file");
    send(exchange, read());
  };
  return {
    "/": { GET: (exchange) => give(exchange, "index.html") },
    "/assets/{id}": { GET: give },
  };
}

function send(exchange: Exchange, { type, bytes, gzipped, etag }: Asset): void {
  // The tab icon must still load when Ferry is gone: it shows exactly that.
  const kept = type === TYPES[".svg"] ? "max-age=604800" : "no-cache";
  const headers = [...SAFETY, "cache-control", kept, "etag", etag];
  if (exchange.header("if-none-match")?.includes(etag) === true) return exchange.sendNothing(304, headers);
  const takes = /\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))/i.test(exchange.header("accept-encoding") ?? "");
  if (takes) exchange.sendBytes(type, gzipped, [...headers, "content-encoding", "gzip"]);
  else exchange.sendBytes(type, bytes, headers);
}
