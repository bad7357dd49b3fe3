/** The dashboard of a real Ferry in a real browser: load, restart, dead letters, token. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import type { Page } from "playwright-core";
import { Eyes, until } from "./chromium.ts";
import { eventually, Ferry, Folder, freePort } from "./harness.ts";
import { StubWorker } from "./stub-worker.ts";

const DEMO = { models: [{ name: "demo", backend: { kind: "simulated", workers: 4, baseMs: 40 } }] };

let eyes: Eyes;
before(async () => {
  eyes = await Eyes.open();
});
after(() => eyes[Symbol.asyncDispose]());

const text = (page: Page, selector: string): Promise<string> => page.locator(selector).first().innerText();

/** Requests that come until the end of the scope. */
function load(
  ferry: Ferry,
  callers = 40,
  input: (n: number) => unknown = (n) => `text ${n}`,
): AsyncDisposable {
  const stop = new AbortController();
  let n = 0;
  const call = async (): Promise<void> => {
    while (!stop.signal.aborted) await ferry.post({ input: input(n++) });
  };
  const calls = Array.from({ length: callers }, call);
  return {
    [Symbol.asyncDispose]: async () => {
      stop.abort();
      await Promise.allSettled(calls);
    },
  };
}

describe("the dashboard", () => {
  test("asks for nothing outside, complains of nothing, and moves under load", async () => {
    await using ferry = await Ferry.start(DEMO);
    await using look = await eyes.look(ferry.adminUrl);
    const { page, troubles } = look;
    await page.locator("#live[data-state=live]").waitFor();
    await page.locator("#empty").waitFor();
    assert.match(await text(page, "#empty-curl"), new RegExp(`curl -s --json .* ${ferry.url}/v1/inference`));
    assert.equal(await page.locator("#demo").isVisible(), true);
    {
      await using _load = load(ferry);
      await page.locator("#empty").waitFor({ state: "hidden" });
      await until(page, "parseFloat(document.querySelector('.tile .number').textContent) > 0");
      await until(page, "document.title.includes('/s')");
      const picture = "document.getElementById('lane-canvas').toDataURL()";
      const first = await page.evaluate(picture);
      await until(page, `${picture} !== ${JSON.stringify(first)}`);
      await until(page, "document.querySelectorAll('.lane').length === 4");
      await until(page, "document.querySelector('#latency canvas') !== null");
      await until(page, "parseFloat(document.querySelector('#saved .saving:last-child b').textContent) > 0");
    }
    assert.match(await page.title(), /Ferry$/);
    assert.deepEqual(troubles, []);
  });

  test("shows what long inputs cost the others, once a model is known to pad", async () => {
    const backend = { kind: "simulated", workers: 1, baseMs: 5, perTokenMs: 0.05 };
    const padded = { name: "padded", backend, maxBatchSize: 16, lengths: [8, 128] };
    await using ferry = await Ferry.start({ models: [padded] });
    await using look = await eyes.look(ferry.adminUrl);
    const { page, troubles } = look;
    await page.locator("#live[data-state=live]").waitFor();
    assert.equal(await page.locator("#padding-panel").isVisible(), false);
    {
      await using _load = load(ferry, 40, (n) => new Array<number>(n % 4 === 0 ? 120 : 8).fill(n));
      await page.locator("#padding-panel").waitFor();
      await until(
        page,
        "/a token of the padded batch/.test(document.getElementById('padding-cost').textContent)",
      );
      await until(page, "/^Grouping by length/.test(document.getElementById('padding-saved').textContent)");
    }
    const { models } = JSON.parse((await ferry.admin("/internal/workers")).text) as {
      models: { cost: { kind: string; grouped: boolean; per_token_ms: number; padding_ratio: number } }[];
    };
    const { kind, grouped, per_token_ms, padding_ratio } = models[0]!.cost;
    assert.deepEqual([kind, grouped], ["padded", true]);
    assert.ok(per_token_ms > 0 && padding_ratio >= 1);
    const { text: metrics } = await ferry.admin("/metrics");
    assert.match(metrics, /^ferry_padding_ratio\{model="padded"\} \d/m);
    assert.deepEqual(troubles, []);
  });

  test("says that the connection is lost, keeps what it shows, and comes back with a restarted Ferry", async () => {
    await using folder = await Folder.make();
    const config = { ...DEMO, admin: { listen: `127.0.0.1:${await freePort()}` } };
    await using first = await Ferry.start(config, folder);
    await using look = await eyes.look(first.adminUrl);
    const { page } = look;
    {
      await using _load = load(first, 4);
      await until(page, "parseFloat(document.querySelector('.tile .number').textContent) > 0");
    }
    await first.kill();
    await page.getByText(/Connection lost, retrying in \d s/).waitFor();
    await page.locator("#live[data-state=lost]").waitFor();
    assert.match(await text(page, "#live-text"), /^last update \d+ s ago$/);
    assert.equal(await page.locator(".lane").count(), 4, "what was seen stays");
    await using second = await Ferry.start(config, folder);
    await page
      .locator("#alert-act")
      .click({ timeout: 5000 })
      .catch(() => undefined);
    await page.locator("#live[data-state=live]").waitFor();
    assert.equal(await page.locator("#alert").isVisible(), false);
    await using _load = load(second, 4);
    await until(page, "parseFloat(document.querySelector('.tile .number').textContent) > 0");
  });

  test("replays and purges a dead letter, and tells its story", async () => {
    await using worker = await StubWorker.listen((call) => call.reply(500, "no"));
    const backend = { kind: "http", protocol: "batch", workers: [worker.url] };
    const retry = { max: 0, baseMs: 1, maxMs: 1 };
    const health = { failures: 50, ejectMs: 10 };
    await using ferry = await Ferry.start({ models: [{ name: "m", backend, retry, health }] });
    const ids = [await ferry.accept({ input: "first" }), await ferry.accept({ input: "<b>second</b>" })];
    await eventually(async () => (await ferry.health()).dead_letters === 2);
    await using look = await eyes.look(ferry.adminUrl);
    const { page, troubles } = look;
    await page.locator("#dead button").click();
    await page.getByLabel(`Details ${ids[1]}`).click();
    await page.locator("pre").getByText("<b>second</b>").waitFor();
    worker.behave = (call) => call.echo();
    await page.getByLabel(`Replay ${ids[0]}`).click();
    await page.getByText(`${ids[0]} is queued again.`).waitFor();
    assert.equal((await ferry.result(ids[0]!)).status, "SUCCESS");
    const purge = page.getByLabel(`Purge ${ids[1]}`);
    await purge.click();
    assert.equal((await ferry.health()).dead_letters, 1, "asked twice");
    await purge.click();
    await page.getByText("There is none.").waitFor();
    assert.equal((await ferry.health()).dead_letters, 0);
    await page.keyboard.press("Escape");
    await page.keyboard.press("/");
    await page.keyboard.type(ids[0]!);
    await page.keyboard.press("Enter");
    await page.locator("#story").getByText("Done").waitFor();
    assert.match(await text(page, "#story .steps"), /Arrived[^]*Queued[^]*Sent to a worker[^]*Done/);
    assert.deepEqual(troubles, []);
  });

  test("asks for the token, refuses a wrong one, and takes one from the address", async () => {
    const token = "a-token-that-is-long-enough";
    await using ferry = await Ferry.start({ ...DEMO, admin: { listen: "127.0.0.1:0", token } });
    await using look = await eyes.look(ferry.adminUrl);
    const { page } = look;
    const field = page.getByRole("textbox", { name: "Admin token" });
    await field.fill("wrong");
    await page.keyboard.press("Enter");
    await page.getByText("That token was refused.").waitFor();
    await field.fill(token);
    await page.keyboard.press("Enter");
    await page.locator("#live[data-state=live]").waitFor();
    await page.reload();
    await page.locator("#live[data-state=live]").waitFor();
    await using other = await eyes.look(`${ferry.adminUrl}/#token=${token}`);
    await other.page.locator("#live[data-state=live]").waitFor();
    assert.doesNotMatch(other.page.url(), /token/, "it is gone from the address bar");
    assert.deepEqual(other.troubles, []);
  });

  test("is not there when telemetry.dashboard is false", async () => {
    await using ferry = await Ferry.start({ ...DEMO, telemetry: { dashboard: false } });
    assert.equal((await ferry.admin("/")).status, 404);
    assert.equal((await ferry.admin("/assets/app.js")).status, 404);
  });
});
