/** Web pages on the machine where Ferry runs: on loopback without authentication they are refused, programs are not. */
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { once } from "node:events";
import type { AddressInfo } from "node:net";
import { after, before, describe, test } from "node:test";
import { chromium } from "playwright-core";
import { PageGuard } from "../../src/gateway/page-guard.ts";
import { findChromium } from "../e2e/chromium.ts";
import { assertError, Ferry } from "../e2e/harness.ts";
import { openModel, OpenWorker } from "../e2e/open-worker.ts";
import { type RawAnswer, RawClient } from "../e2e/raw-client.ts";

describe("the rule", () => {
  const guard = new PageGuard(["api.example.com"], "advice");
  const served = [
    { host: "127.0.0.1:8080" },
    { host: "127.9.9.9" },
    { host: "[::1]:8080" },
    { host: "localhost:8080" },
    { host: "LocalHost." },
    { host: "app.localhost:3000" },
    { host: "192.168.1.5:8080" },
    { host: "API.example.com:443" },
    // HTTP/1.0.
    {},
    { host: "localhost:8080", origin: "http://localhost:8080" },
    { host: "[::1]:8080", origin: "http://[::1]:8080" },
    { host: "localhost:8080", origin: "http://localhost:8080", "sec-fetch-site": "same-origin" },
    // A person at the address bar.
    { host: "localhost:8080", "sec-fetch-site": "none" },
    // A page of a proxy on the same machine, which passes on or replaces the name.
    { host: "127.0.0.1:8080", origin: "https://app.example", "sec-fetch-site": "same-origin" },
    { host: "127.0.0.1:8080", origin: "https://api.example.com" },
    { host: "api.example.com", origin: "https://api.example.com:444", "sec-fetch-site": "cross-site" },
  ];
  for (const headers of served) {
    test(`serves ${JSON.stringify(headers)}`, () => assert.equal(guard.flaw(headers), undefined));
  }
  const refused = [
    { host: "evil.example:8080" },
    { host: "evil.example:8080", origin: "http://evil.example:8080", "sec-fetch-site": "same-origin" },
    { host: "localhost.evil.example" },
    { host: "127.0.0.1.evil.example" },
    { host: "127.0.0.1@evil.example" },
    { host: "notlocalhost" },
    { host: "" },
    { host: "localhost:8080", origin: "https://evil.example" },
    { host: "localhost:8080", origin: "null" },
    { host: "localhost:8080", origin: "" },
    { host: "localhost:8080", origin: "file://" },
    { host: "localhost:8080", origin: "http://localhost:3000" },
    { host: "localhost:8080", "sec-fetch-site": "cross-site" },
    { host: "localhost:8080", "sec-fetch-site": "same-site" },
    { host: "localhost:8080", origin: "http://localhost:8080", "sec-fetch-site": "cross-site" },
    { host: "localhost:8080", "sec-fetch-site": "whatever comes next" },
    { host: "localhost:8080", origin: "https://evil.example/api.example.com" },
  ];
  for (const headers of refused) {
    test(`refuses ${JSON.stringify(headers)}`, () => {
      const flaw = guard.flaw(headers);
      assert.equal(flaw?.code, "FORBIDDEN");
      assert.match(flaw.message, /; advice$/);
    });
  }
});

const JSON_HEAD = "Content-Type: application/json";

describe("a Ferry on loopback without authentication", () => {
  let worker: OpenWorker;
  let ferry: Ferry;
  before(async () => {
    worker = await OpenWorker.listen();
    const auth = { allowedHosts: ["ferry"] };
    ferry = await Ferry.start({ models: [openModel([worker.url])], auth });
  });
  after(async () => {
    await ferry[Symbol.asyncDispose]();
    await worker[Symbol.asyncDispose]();
  });

  async function say(url: string, line: string, ...fields: readonly string[]): Promise<RawAnswer> {
    await using client = await RawClient.connect(url);
    client.send([`${line} HTTP/1.1`, ...fields, "Content-Length: 2", "", "{}"].join("\r\n"));
    return await client.answer();
  }

  // Ferry's own routes, a drop-in protocol's, what is passed through, what is nowhere, and results.
  const lines = [
    "POST /v1/inference",
    "POST /api/inference",
    "POST /v1/embeddings",
    "POST /models/open/anything",
    "POST /anything",
    "GET /anything",
    "GET /v1/result/0",
    "GET /openapi.json",
  ];
  for (const line of lines) {
    test(`${line}: no page of another site, by whichever name`, async () => {
      const text = "Content-Type: text/plain";
      for (const fields of [
        ["Host: localhost", text, "Origin: https://evil.example"],
        ["Host: localhost", text, "Origin: null"],
        ["Host: localhost", text, "Sec-Fetch-Site: cross-site"],
        ["Host: evil.example", JSON_HEAD],
        ["Host: evil.example", JSON_HEAD, "X-Forwarded-For: 10.0.0.1", "X-Forwarded-Host: localhost"],
      ]) {
        const answer = await say(ferry.url, line, ...fields);
        assertError(answer, 403, "FORBIDDEN");
        assert.match(answer.text, /auth\.allowedHosts, or set auth\.mode: required/);
      }
    });
  }

  test("none of it reached the worker, and programs do", async () => {
    assert.deepEqual(worker.calls, []);
    for (const host of ["localhost", new URL(ferry.url).host, "[::1]:8080", "ferry"]) {
      assert.equal((await say(ferry.url, "POST /anything", `Host: ${host}`)).status, 200, host);
    }
    assert.equal(worker.calls.length, 4);
  });

  test("the admin listener has the same rule: no page takes the places of those who watch", async () => {
    const url = ferry.adminUrl;
    const page = ["Host: localhost", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors"];
    for (const path of ["/internal/live", "/internal/health", "/metrics"]) {
      assertError(await say(url, `GET ${path}`, ...page), 403, "FORBIDDEN");
      assertError(await say(url, `GET ${path}`, "Host: evil.example"), 403, "FORBIDDEN");
      assertError(await say(url, `GET ${path}`, "Host: ferry"), 403, "FORBIDDEN");
    }
    assert.equal((await say(url, "GET /healthz", ...page)).status, 200);
  });

  test("a real browser with a page of another site gets nothing through", async () => {
    const site = createServer((_, response) => {
      response.setHeader("content-type", "text/html");
      response.end("<title>evil</title>");
    });
    site.listen(0, "127.0.0.1");
    await once(site, "listening");
    const browser = await chromium.launch({
      executablePath: findChromium(),
      args: ["--no-sandbox", "--host-resolver-rules=MAP evil.example 127.0.0.1"],
    });
    try {
      const page = await browser.newPage();
      const calls = worker.calls.length;
      await page.goto(`http://evil.example:${(site.address() as AddressInfo).port}/`);
      const attack = `(async (api, admin) => {
        const plain = { method: "POST", mode: "no-cors", body: "{}", headers: { "content-type": "text/plain" } };
        const load = (url) => new Promise((done) => {
          const image = new Image();
          image.onload = image.onerror = done;
          image.src = url;
        });
        await fetch(api + "/evil-post", plain).catch(() => {});
        await fetch(api + "/evil-get", { mode: "no-cors" }).catch(() => {});
        await load(api + "/evil-image");
        // More than there are places; a stream that is served never loads.
        for (let count = 0; count < 25; count++) await load(admin + "/internal/live?" + count);
      })`;
      const urls = `(${JSON.stringify(ferry.url)}, ${JSON.stringify(ferry.adminUrl)})`;
      await page.evaluate(attack + urls);
      // Its name is made to point here.
      const port = new URL(ferry.url).port;
      const rebound = await page.goto(`http://evil.example:${port}/evil-rebound`);
      assert.equal(rebound?.status(), 403);
      assert.equal(
        await page.evaluate(
          `fetch("/evil-own", { method: "POST", body: "{}" }).then((answer) => answer.status)`,
        ),
        403,
      );
      assert.equal(worker.calls.length, calls);
      await using viewer = await RawClient.connect(ferry.adminUrl);
      viewer.send("GET /internal/live HTTP/1.1\r\nHost: localhost\r\n\r\n");
      while (!viewer.rest.includes("event: hello")) await once(viewer.socket, "data");
    } finally {
      await browser.close();
      site.close();
    }
  });
});

test("with authentication, or open to the network, the name and the page do not matter", async () => {
  await using worker = await OpenWorker.listen();
  await using wide = await Ferry.start({ listen: "0.0.0.0:0", models: [openModel([worker.url])] });
  await using client = await RawClient.connect(wide.url.replace("0.0.0.0", "127.0.0.1"));
  client.send("GET /x HTTP/1.1\r\nHost: gateway.example\r\nOrigin: https://app.example\r\n\r\n");
  assert.equal((await client.answer()).status, 200);
});
