/** The dashboard where it is hard: long pauses, floods of dead letters, odd tokens, parts that break. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import type { Page } from "playwright-core";
import type { Scene } from "../observe/dashboard/fake-frames.ts";
import { FakeLive } from "../observe/dashboard/fake-live.ts";
import { drawn, Eyes, type Look, until } from "./chromium.ts";

let eyes: Eyes;
before(async () => {
  eyes = await Eyes.open();
});
after(() => eyes[Symbol.asyncDispose]());

type Trial = Look & { fake: FakeLive };

async function open(
  scene: Scene,
  prepare: (fake: FakeLive) => void = () => {},
  options = {},
): Promise<Trial> {
  const fake = new FakeLive(scene);
  prepare(fake);
  await fake.start();
  const look = await eyes.look(fake.url, options);
  await look.page.locator("#live[data-state=live]").waitFor();
  await until(look.page, "!document.body.classList.contains('loading')");
  const close = async (): Promise<void> => {
    await look[Symbol.asyncDispose]();
    await fake[Symbol.asyncDispose]();
  };
  return { ...look, fake, [Symbol.asyncDispose]: close };
}

const text = (page: Page, selector: string): Promise<string> => page.locator(selector).first().innerText();
const focused = (page: Page): Promise<string> =>
  page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.localName");

describe("a pause", () => {
  test("keeps what it shows, however long; range and model may be changed in it", async () => {
    await using look = await open("healthy");
    const { page, fake, troubles } = look;
    await page.keyboard.press("Space");
    await drawn(page);
    const picture = "document.getElementById('lane-canvas').toDataURL()";
    const [lanes, rate] = [await page.evaluate(picture), await text(page, ".tile .number")];
    // Ten minutes go by.
    fake.alter = (frame) => ({ ...frame, now: frame.now + 600_000 });
    await until(page, `performance.now() > ${Number(await page.evaluate("performance.now()")) + 1500}`);
    assert.equal(await page.evaluate(picture), lanes);
    assert.equal(await text(page, ".tile .number"), rate);
    await page.keyboard.press("[");
    assert.equal(await text(page, ".why .hint"), "last 1 min");
    assert.equal(await text(page, ".tile .number"), rate);
    await page.keyboard.press("m");
    assert.equal(await page.locator("#model").inputValue(), "rerank");
    assert.equal(await text(page, "#live-text"), "paused");
    await page.keyboard.press("Space");
    await until(page, `document.getElementById("live-text").textContent === "live"`);
    assert.deepEqual(troubles, []);
  });
});

describe("when something breaks", () => {
  test("a part that cannot be shown says so; the others go on, and the stream is not torn", async () => {
    await using look = await open("healthy");
    const { page, fake, troubles } = look;
    fake.alter = (frame) => ({
      ...frame,
      models: frame.models.map((model) => ({ ...model, refusedTenants: null as never })),
    });
    await page.locator(".refused[data-broken]").waitFor();
    assert.equal(await page.locator("[data-broken]").count(), 1);
    const before = await text(page, "#rate-read");
    await until(page, `document.getElementById("rate-read").textContent !== ${JSON.stringify(before)}`);
    await until(page, `document.getElementById("live-text").textContent === "live"`);
    assert.equal(troubles.length, 1, "the browser's console names it, once");
    fake.alter = (frame) => frame;
    await page.locator(".refused:not([data-broken])").waitFor();
  });

  test("another version of Ferry brings its own page", async () => {
    await using look = await open("healthy");
    const { page, fake } = look;
    await page.keyboard.press("m");
    await page.keyboard.press("[");
    // Not asked while it loads: an answer from a page that goes away may never come.
    const loaded = page.waitForEvent("load");
    fake.version = "9.9.9";
    fake.cut();
    await loaded;
    await page.getByText("Ferry 9.9.9").waitFor();
    assert.equal(await page.locator("#model").inputValue(), "rerank", "what was chosen stays");
    assert.equal(await text(page, "#ranges [aria-pressed=true]"), "1 m");
  });

  test("the tab's icon is there to say that Ferry is gone", async () => {
    await using look = await open("healthy");
    const { page, fake, troubles } = look;
    fake.cut();
    await fake[Symbol.asyncDispose]();
    await page.locator("#live[data-state=lost]").waitFor();
    assert.match((await page.locator("#favicon").getAttribute("href"))!, /icon-quiet/);
    assert.match(await page.title(), /no connection/);
    assert.deepEqual(
      troubles.filter((trouble) => trouble.includes("icon")),
      [],
    );
  });
});

describe("many dead letters", () => {
  test("10,000: some are listed, all are counted, and the list stands still under the pointer", async () => {
    await using look = await open("healthy", (fake) => (fake.letters = 10_000));
    const { page, fake } = look;
    await page.keyboard.press("d");
    await page.getByRole("heading", { name: "10,000 dead letters" }).waitFor();
    assert.equal(await page.locator(".letter").count(), 200);
    await page.getByText(/and 9,800 older ones/).waitFor();
    const first = await text(page, ".letter code");
    await page
      .getByLabel(/^Details/)
      .first()
      .click();
    await page.locator(".letter pre").waitFor();
    fake.letters += 40;
    await page.getByRole("button", { name: "Now 10,040: show" }).waitFor();
    assert.equal(await text(page, ".letter code"), first);
    assert.equal(await page.locator(".letter pre").count(), 1, "what was opened stays open");
    await page.getByRole("button", { name: "Now 10,040: show" }).click();
    await page.getByRole("heading", { name: "10,040 dead letters" }).waitFor();
    // Closing is always in reach.
    await page.locator(".letter").last().scrollIntoViewIfNeeded();
    await page.locator("#letters").getByLabel("Close").click();
    assert.equal(await page.locator("dialog[open]").count(), 0);
  });

  test("the focus goes to the next letter, not to nowhere; all can be replayed at once", async () => {
    await using look = await open("healthy", (fake) => (fake.letters = 300));
    const { page, fake } = look;
    await page.keyboard.press("d");
    await page.locator(".letter").first().waitFor();
    const next = await text(page, ".letter:nth-child(2) code");
    await page
      .getByLabel(/^Replay 0/)
      .first()
      .focus();
    await page.keyboard.press("Enter");
    await page.getByText(/is queued again/).waitFor();
    assert.equal(await focused(page), `Replay ${next}`);
    const all = page.locator("#letters .dialog-head button:not([aria-label])").last();
    await all.click();
    assert.equal(await all.innerText(), "Replay all 299?");
    await all.click();
    await page.getByText("299 tasks queued again.").waitFor();
    assert.equal(new Set(fake.replayed).size, 300);
    await page.getByText("There is none.").waitFor();
  });
});

describe("tokens", () => {
  const token = "a+b/c=%-long-enough";

  test("Escape does not lead to a page without one; one that no header can hold is refused as others are", async () => {
    await using fake = new FakeLive("healthy");
    fake.token = token;
    await fake.start();
    await using look = await eyes.look(fake.url);
    const { page } = look;
    const field = page.getByRole("textbox", { name: "Admin token" });
    await field.waitFor();
    for (let i = 0; i < 3; i++) {
      await page.keyboard.press("Escape");
      await field.waitFor();
    }
    await field.fill("“typo-graphic”");
    await page.keyboard.press("Enter");
    await page.getByText("That token was refused.").waitFor();
    await field.fill(token);
    await page.keyboard.press("Enter");
    await page.locator("#live[data-state=live]").waitFor();
  });

  test("from the address it is taken as it stands, also into a page that is open already", async () => {
    await using fake = new FakeLive("healthy");
    fake.token = token;
    await fake.start();
    await using look = await eyes.look(fake.url);
    const { page } = look;
    const asked: string[] = [];
    page.on("request", (request) => asked.push(`${request.url()} ${request.headers()["referer"] ?? ""}`));
    await page.locator("#token[open]").waitFor();
    const paste = async (hash: string): Promise<void> => {
      await Promise.all([
        page.waitForEvent("load"),
        page.evaluate(`setTimeout(() => (location.hash = ${JSON.stringify(hash)}))`),
      ]);
      await page.locator("#live[data-state=live]").waitFor();
      assert.doesNotMatch(page.url(), /token/);
    };
    await paste(`token=${encodeURIComponent(token)}`);
    await page.evaluate("sessionStorage.clear()");
    await paste(`token=${token}`);
    assert.deepEqual(
      asked.filter((each) => each.includes("a+b") || each.includes(encodeURIComponent(token))),
      [],
    );
  });
});

describe("numbers that belong together", () => {
  test("the header of a chart says what the number at the top says, and of when", async () => {
    await using look = await open("overload");
    const { page } = look;
    const same = `(() => {
      const number = [...document.querySelectorAll(".tile .value")[2].children].map((e) => e.textContent).join(" ");
      return document.getElementById("latency-read").textContent.startsWith("last 10 s: ━ p99 " + number);
    })()`;
    await until(page, same);
    await page.locator("#latency").hover();
    await until(page, "/^\\d+ s ago: /.test(document.getElementById('latency-read').textContent)");
  });
});

describe("a part of a fleet", () => {
  test("a batcher's page shows tasks, and nothing of the requests that it never sees", async () => {
    await using look = await open("healthy", (fake) => (fake.role = "batcher"));
    const { page } = look;
    assert.equal(await text(page, ".tile .label"), "Tasks");
    await until(page, "parseFloat(document.querySelector('.tile .number').textContent) > 0");
    const panels = await page.locator("main .panel:visible h2").allInnerTexts();
    assert.deepEqual(
      panels.filter((name) => ["Latency", "Requests", "Refused"].includes(name)),
      [],
    );
    assert.ok(panels.includes("GPU time"));
  });

  test("those whom nobody refused at the door are refusals too", async () => {
    await using look = await open("healthy");
    const { page, fake } = look;
    fake.alter = (frame) => ({
      ...frame,
      models: frame.models.map((model) => {
        const { slots } = model;
        const refused = slots.columns.requests;
        return { ...model, slots: { ...slots, columns: { ...slots.columns, refused } } };
      }),
    });
    await page.getByText(/^[\d,.k]+ while the store did not answer$/).waitFor();
  });
});

describe("other eyes", () => {
  test("with a system's own colours the reasons keep theirs, and what is pressed shows", async () => {
    await using look = await open("overload", undefined, { forcedColors: "active" });
    const { page } = look;
    const colour = (selector: string): Promise<string> =>
      page.evaluate(`getComputedStyle(document.querySelector(${JSON.stringify(selector)})).backgroundColor`);
    assert.equal(await colour(".swatch.full"), "rgb(22, 58, 179)");
    assert.notEqual(
      await colour("#ranges [aria-pressed=true]"),
      await colour("#ranges [aria-pressed=false]"),
    );
  });

  test("a batch's card gives the focus back to the lanes", async () => {
    await using look = await open("healthy");
    const { page } = look;
    await page.keyboard.press("l");
    await page.keyboard.press("ArrowLeft");
    await page.keyboard.press("Enter");
    await page.keyboard.press("Escape");
    assert.equal(await page.evaluate("document.activeElement.id"), "lane-canvas");
  });
});
