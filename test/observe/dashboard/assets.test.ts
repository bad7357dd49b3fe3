/** The page's files as they are served: small, safe, complete. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { gunzipSync } from "node:zlib";
import { request } from "undici";
import { findAssets } from "../../../src/observe/dashboard/assets.ts";
import { FakeLive } from "./fake-live.ts";

describe("assets", () => {
  const fake = new FakeLive("empty");
  before(() => fake.start());
  after(() => fake[Symbol.asyncDispose]());

  test("the whole page is at most 80 KB on the wire", (t) => {
    let bytes = 0;
    for (const read of findAssets().values()) bytes += read().gzipped.length;
    t.diagnostic(`${bytes} bytes`);
    assert.ok(bytes <= 80 * 1024, `${bytes} bytes`);
  });

  test("the page asks only for what is there, and has no script or style of its own", () => {
    const assets = findAssets();
    const html = assets.get("index.html")!().bytes.toString();
    for (const [, name] of html.matchAll(/\/assets\/([\w.-]+)/g)) assert.ok(assets.has(name!), name!);
    assert.doesNotMatch(html, /<style|<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=|https?:/);
    for (const [name, read] of assets) {
      if (name.startsWith("uplot")) continue;
      const text = read().bytes.toString();
      assert.doesNotMatch(text, /innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(/, name);
      for (const [, other] of text.matchAll(/from "\.\/([\w.-]+)"/g)) assert.ok(assets.has(other!), other!);
    }
  });

  test("headers keep everything else out; a file that did not change is not sent again", async () => {
    const first = await request(`${fake.url}/`, { headers: { "accept-encoding": "gzip" } });
    const { headers } = first;
    assert.equal(first.statusCode, 200);
    assert.equal(headers["content-type"], "text/html; charset=utf-8");
    assert.match(String(headers["content-security-policy"]), /^default-src 'self';.*frame-ancestors 'none'/);
    assert.equal(headers["x-content-type-options"], "nosniff");
    assert.equal(headers["referrer-policy"], "no-referrer");
    assert.equal(headers["cache-control"], "no-cache");
    assert.equal(headers["content-encoding"], "gzip");
    assert.match(gunzipSync(await first.body.bytes()).toString(), /^<!doctype html>/);
    const etag = String(headers["etag"]);
    const again = await request(`${fake.url}/`, { headers: { "if-none-match": etag } });
    assert.deepEqual([again.statusCode, again.headers["etag"], await again.body.text()], [304, etag, ""]);
    const plain = await request(`${fake.url}/assets/app.js`, { headers: { "accept-encoding": "gzip;q=0" } });
    assert.equal(plain.headers["content-encoding"], undefined);
    assert.match(await plain.body.text(), /^import/m);
    const head = await request(`${fake.url}/`, { method: "HEAD" });
    assert.deepEqual([head.statusCode, await head.body.text()], [200, ""]);
  });

  test("nothing else can be had: no other file, no folder above", async () => {
    for (const path of ["/assets/none.js", "/assets/..%2fassets.ts", "/assets/", "/assets/constructor"]) {
      const answer = await request(`${fake.url}${path}`);
      assert.equal(answer.statusCode, 404, path);
      await answer.body.dump();
    }
  });
});
