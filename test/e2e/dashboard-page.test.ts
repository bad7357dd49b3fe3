/**
 * The dashboard's page in a real browser, with made-up frames behind it: keys, themes, narrow screens, what a
 * screen reader finds, hostile names, and 10,000 requests/s worth of frames.
 */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import type { CDPSession, Page } from "playwright-core";
import type { CostFrame } from "../../src/observe/dashboard/frames.ts";
import type { Scene } from "../observe/dashboard/fake-frames.ts";
import { FakeLive } from "../observe/dashboard/fake-live.ts";
import { drawn, Eyes, type Look, until } from "./chromium.ts";

let eyes: Eyes;
before(async () => {
  eyes = await Eyes.open();
});
after(() => eyes[Symbol.asyncDispose]());

async function open(scene: Scene, options = {}): Promise<Look & { fake: FakeLive }> {
  const fake = new FakeLive(scene);
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

const pressed = (page: Page, selector: string): Promise<string | null> =>
  page.locator(selector).getAttribute("aria-pressed");

describe("the learned curve", () => {
  for (const options of [
    { viewport: { width: 1440, height: 900 }, colorScheme: "light" },
    { viewport: { width: 390, height: 800 }, colorScheme: "dark" },
  ] as const) {
    test(`is drawn with its knee and what follows, ${options.viewport.width} px, ${options.colorScheme}`, async () => {
      await using look = await open("healthy", options);
      const { page, troubles } = look;
      await page.locator("#curve .bar").nth(7).waitFor();
      assert.equal(await page.locator("#curve .bar").count(), 8);
      assert.equal(await page.locator("#curve [data-knee]").getAttribute("data-label"), "32");
      assert.equal(await page.locator("#curve [data-beyond]").count(), 2);
      assert.equal(await page.locator("#curve-read").innerText(), "knee at 32: 50 ms, 640/s a worker");
      assert.match(
        await page.locator("#curve-hint").innerText(),
        /maxBatchSize 64 lies beyond the knee at 32/,
      );
      assert.match((await page.locator("#curve").getAttribute("aria-label")) ?? "", /knee at 32/);
      const tall = await page.evaluate(
        "[...document.querySelectorAll('#curve i')].map((bar) => Math.round(bar.getBoundingClientRect().height))",
      );
      const [first, last] = [(tall as number[])[0]!, (tall as number[]).at(-1)!];
      assert.ok(Math.abs(last - 2 * first) <= 2, `${String(tall)}: twice the time is twice as high`);
      const wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth";
      assert.equal(await page.evaluate(wide), true, "nothing is wider than the screen");
      await page.keyboard.press("v");
      await page.locator("#curve-twin table tbody tr").nth(7).waitFor();
      assert.deepEqual(troubles, []);
    });
  }

  test("fourteen sizes of three digits stand side by side on 320 px", async () => {
    await using look = await open("healthy", { viewport: { width: 320, height: 800 } });
    const { page, fake, troubles } = look;
    const points = Array.from({ length: 14 }, (_, at) => [100 + at, 300 + at, 9] as const);
    const curve = { points, knee: null, hint: "" };
    fake.alter = (frame) => ({ ...frame, models: frame.models.map((model) => ({ ...model, curve })) });
    await page.locator("#curve .bar").nth(13).waitFor();
    const widths = (await page.evaluate(`[...document.querySelectorAll("#curve .bar")].map((bar) => {
      const canvas = document.createElement("canvas").getContext("2d");
      const room = bar.nextElementSibling?.getBoundingClientRect().left ?? Infinity;
      return [[bar.firstElementChild, "::before"], [bar, "::after"]].map(([node, part]) => {
        canvas.font = getComputedStyle(node, part).font;
        return canvas.measureText("888").width / (room - bar.getBoundingClientRect().left);
      });
    })`)) as number[][];
    for (const width of widths.flat()) assert.ok(width <= 1, `${width} of the room`);
    assert.deepEqual(troubles, []);
  });

  test("says so where nothing is known, or another process knows it; a hostile hint is text", async () => {
    await using look = await open("empty");
    const { page, fake, troubles } = look;
    await page.locator("#curve-hint").getByText("Not known yet.").waitFor();
    assert.equal(await page.locator("#curve").isVisible(), false);
    fake.scene = "healthy";
    await page.locator("#curve .bar").first().waitFor();
    fake.alter = (frame) => ({ ...frame, models: frame.models.map((model) => ({ ...model, curve: null })) });
    await page.locator("#curve-hint").getByText("Not known yet.").waitFor();
    fake.alter = (frame) => frame;
    fake.scene = "nasty";
    await page.locator("#curve-hint").getByText("<img src=x").waitFor();
    assert.deepEqual(troubles, []);
  });
});

describe("padding", () => {
  for (const options of [
    { viewport: { width: 1440, height: 900 }, colorScheme: "light" },
    { viewport: { width: 390, height: 800 }, colorScheme: "dark" },
  ] as const) {
    test(`is drawn beside order of arrival, with what grouping saved, ${options.viewport.width} px`, async () => {
      await using look = await open("overload", options);
      const { page, troubles } = look;
      await page.locator("#padding canvas").waitFor();
      assert.match(
        await page.locator("#padding-read").innerText(),
        /^last 10 s: ━ 1\.\d+× ┅ [56](\.\d+)?× in order of arrival$/,
      );
      assert.match(await page.locator("#padding-split").innerText(), /useful cells 7\d %\s+padding 2\d %/);
      assert.match(
        await page.locator("#padding-saved").innerText(),
        /^Grouping by length saved \d,\d+ s of GPU time, 66 % of what order of arrival would have taken\.$/,
      );
      assert.equal(
        await page.locator("#padding-cost").innerText(),
        "A batch takes 0.5 ms + 5 µs a row + 0.46 µs a token of the padded batch.",
      );
      assert.match(await page.locator("#gpu-split").innerText(), /useful .*\s+padding .*\s+idle/);
      assert.match(
        await page.locator("#curve-hint").innerText(),
        /It follows their lengths more than their number/,
      );
      await page.keyboard.press("v");
      await page.locator("#padding-twin table tbody tr").nth(11).waitFor();
      const wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth";
      assert.equal(await page.evaluate(wide), true, "nothing is wider than the screen");
      assert.deepEqual(troubles, []);
    });
  }

  test("is not there where nothing was measured or lengths do not matter, and says where grouping is off or costs", async () => {
    await using look = await open("empty");
    const { page, fake, troubles } = look;
    assert.equal(await page.locator("#padding-panel").isVisible(), false);
    const words = "1 ms + 2 µs a token";
    const say = (cost: CostFrame | null, more: object): void => {
      fake.alter = (frame) => ({
        ...frame,
        models: frame.models.map(({ slots, ...model }) => {
          const altered = Object.entries(more).map(([name, value]) => [
            name,
            Array(slots.length).fill(value),
          ]);
          const columns = { ...slots.columns, ...Object.fromEntries(altered) };
          return { ...model, cost, slots: { ...slots, columns } };
        }),
      });
    };
    const cells = { usefulCells: 10, paddedCells: 20, inOrderCells: 15 };
    say({ kind: "packed", words, paddingRatio: 2, grouped: false }, cells);
    await page.locator("#padding-panel").waitFor();
    assert.equal(await page.locator("#padding-saved").innerText(), "");
    await page
      .getByText(`A batch takes ${words}. Its time follows what is sent: padding costs nothing.`)
      .waitFor();
    say({ kind: "padded", words, paddingRatio: 2, grouped: false }, cells);
    await page.getByText(`A batch takes ${words}. Inputs are not grouped: lengths is off.`).waitFor();
    say(null, cells);
    await page.locator("#padding-panel").waitFor({ state: "hidden" });
    say(null, { ...cells, groupedMs: 100, savedMs: -20 });
    await page.getByText(/^Grouping by length cost 0\.\d+ s of GPU time\.$/).waitFor();
    assert.deepEqual(troubles, []);
  });

  test("a batch says why it was made of these, when pointed at and when chosen", async () => {
    await using look = await open("overload");
    const { page, troubles } = look;
    const why = /^48 of 64: similar length; 9 longer ones wait for the next worker, at most 12 ms\.$/;
    const box = (await page.locator("#lane-canvas").boundingBox())!;
    // A third of the batches was in order of arrival anyway.
    let chosen = "";
    for (let x = 20; x < box.width && !why.test(chosen); x += 20) {
      await page.mouse.move(box.x + x, box.y + 10);
      chosen = (await page.locator("#lane-canvas").getAttribute("title")) ?? "";
    }
    assert.match(chosen, why);
    await page.keyboard.press("l");
    await page.keyboard.press("ArrowRight");
    for (let step = 0; step < 10; step++) {
      if (why.test(await page.locator("#batch strong").innerText())) break;
      await page.keyboard.press("ArrowLeft");
    }
    assert.match(await page.locator("#batch strong").innerText(), why);
    assert.match(
      await page.locator("#batch dl").innerText(),
      /Lengths\s+up to (16|96) tokens, \S+ on average, 1\.2\d*× padding; in order of arrival up to (412|480)/,
    );
    assert.deepEqual(troubles, []);
  });
});

test("sixty notes scroll within their panel; the page is no longer than what is on it", async () => {
  await using look = await open("healthy");
  const { page, fake } = look;
  fake.alter = (frame) => ({
    ...frame,
    notes: Array.from({ length: 60 }, (_, at) => ({ at: frame.now - at, level: "warn", text: `note ${at}` })),
  });
  await page.locator("#notes li").nth(59).waitFor();
  const rest = "document.documentElement.scrollHeight - document.querySelector('main').offsetHeight";
  assert.ok(Number(await page.evaluate(rest)) < 100, "header and margins");
});

describe("keys", () => {
  test("space pauses what is shown and goes on; the stream is still heard", async () => {
    await using look = await open("healthy");
    const { page } = look;
    await page.keyboard.press("Space");
    assert.equal(await page.locator("#live-text").innerText(), "paused");
    const numbers =
      "[...document.querySelectorAll('.number, .percent')].map((each) => each.textContent).join()";
    const picture = `${numbers} + document.getElementById('lane-canvas').toDataURL()`;
    await drawn(page);
    const still = await page.evaluate(picture);
    const arrived = "performance.now()";
    const from = Number(await page.evaluate(arrived));
    await until(page, `${arrived} > ${from + 1500}`);
    assert.equal(await page.evaluate(picture), still);
    await page.keyboard.press("Space");
    await until(page, `${picture} !== ${JSON.stringify(still)}`);
    await until(page, `document.getElementById("live-text").textContent === "live"`);
  });

  test("[ and ] choose the range, m the model, 1 to 4 a reason, Esc forgets it", async () => {
    await using look = await open("healthy");
    const { page, troubles } = look;
    const range = (): Promise<string> => page.locator("#ranges [aria-pressed=true]").innerText();
    assert.equal(await range(), "5 m");
    await page.keyboard.press("]");
    assert.equal(await range(), "15 m");
    await page.keyboard.press("]");
    await page.keyboard.press("[");
    await page.keyboard.press("[");
    assert.equal(await range(), "1 m");
    assert.equal(await page.locator("#model").inputValue(), "embed");
    await page.keyboard.press("m");
    assert.equal(await page.locator("#model").inputValue(), "rerank");
    for (const [at, key] of ["1", "2", "3", "4"].entries()) {
      await page.keyboard.press(key);
      assert.equal(await pressed(page, `.reason >> nth=${at}`), "true");
    }
    await page.keyboard.press("Escape");
    assert.equal(await page.locator(".reason[aria-pressed=true]").count(), 0);
    assert.deepEqual(troubles, []);
  });

  test("t changes the theme, and the browser remembers it", async () => {
    await using look = await open("healthy", { colorScheme: "light" });
    const { page } = look;
    const ground = "getComputedStyle(document.documentElement).backgroundColor";
    assert.equal(await page.evaluate(ground), "rgb(246, 247, 249)");
    await page.keyboard.press("t");
    assert.equal(await page.evaluate(ground), "rgb(18, 22, 28)");
    await page.reload();
    assert.equal(await page.evaluate(ground), "rgb(18, 22, 28)");
    await page.keyboard.press("t");
    assert.equal(await page.evaluate(ground), "rgb(246, 247, 249)");
  });

  test("/ finds a task, d opens dead letters, ? the keys, v tables; Esc closes", async () => {
    await using look = await open("healthy");
    const { page } = look;
    for (const [key, dialog] of [
      ["d", "#letters"],
      ["?", "#help"],
    ] as const) {
      await page.keyboard.press(key);
      await page.locator(`${dialog}[open]`).waitFor();
      await page.keyboard.press("Escape");
      await page.locator(dialog).waitFor({ state: "hidden" });
    }
    await page.keyboard.press("v");
    await page.locator("#latency-twin table tbody tr").first().waitFor();
    await page.locator("#lanes-twin table tbody tr").first().waitFor();
    await page.keyboard.press("v");
    await page.locator("#latency-twin").waitFor({ state: "hidden" });
    await page.keyboard.press("/");
    await page.keyboard.type("d?tv 0");
    assert.equal(await page.locator("dialog[open]").count(), 0, "one may type in the field");
    await page.locator("#find-id").fill("nobody");
    await page.keyboard.press("Enter");
    await page.locator("#story").getByText("no such task").waitFor();
  });

  test("arrows walk over the lanes, Enter reads a batch", async () => {
    await using look = await open("healthy");
    const { page } = look;
    await page.keyboard.press("l");
    await page.keyboard.press("ArrowLeft");
    await page
      .locator("#batch")
      .getByText(/Left because/)
      .waitFor();
    const shown = (): Promise<string> => page.locator("#batch").innerText();
    const first = await shown();
    await page.keyboard.press("ArrowLeft");
    assert.notEqual(await shown(), first);
    await page.keyboard.press("ArrowDown");
    assert.match(await shown(), /gpu-2/);
    await page.keyboard.press("Enter");
    assert.equal(await page.evaluate("document.activeElement.id"), "batch");
    await page.keyboard.press("Escape");
    await page.locator("#batch").waitFor({ state: "hidden" });
  });
});

describe("what people see", () => {
  test("on a narrow screen nothing scrolls sideways, and what is touched is 44 pixels high", async () => {
    for (const scene of ["healthy", "overload", "nasty", "empty", "down"] as const) {
      await using look = await open(scene, { viewport: { width: 390, height: 844 } });
      const { page } = look;
      assert.equal(await page.evaluate("document.documentElement.scrollWidth"), 390, scene);
      await page.locator("#more").click();
      assert.equal(await page.evaluate("document.documentElement.scrollWidth"), 390, scene);
      const low = `[...document.querySelectorAll("button, select, input")]
        .filter((each) => each.checkVisibility() && each.getBoundingClientRect().height < 44)
        .map((each) => each.outerHTML)`;
      assert.deepEqual(await page.evaluate(low), []);
    }
  });

  test("names, tenants and notes are text, whatever they hold", async () => {
    await using look = await open("nasty");
    const { page, troubles } = look;
    assert.equal(await page.locator("main img").count(), 0);
    assert.equal(await page.locator(".lane .name", { hasText: "<img src=x" }).count(), 1);
    assert.doesNotMatch(await page.title(), /owned/);
    assert.deepEqual(troubles, []);
  });

  test("a worker that is down says why; advice opens; more workers than fit are a page further", async () => {
    await using down = await open("down");
    await down.page.getByText(/connect ECONNREFUSED 10.0.0.7:9000, next try in/).waitFor();
    await down.page.getByText("What would help?").click();
    await down.page.getByText(/Start gpu-3 again/).waitFor();
    assert.match(await down.page.title(), /^▲ /);
    assert.match((await down.page.locator("#favicon").getAttribute("href"))!, /icon-busy/);
    await using crowd = await open("crowd");
    assert.equal(await crowd.page.locator(".lane").count(), 32);
    await crowd.page.getByLabel("Workers after these").click();
    await crowd.page.getByText("33–64 of 70").waitFor();
  });
});

describe("accessibility", () => {
  test("a worker that drains is no capacity: it does not count among those that are there", async () => {
    await using look = await open("down");
    const { page, fake, troubles } = look;
    const note = page.locator(".tile").nth(1).locator(".note");
    await note.getByText("3/4 workers").waitFor();
    fake.alter = (frame) => ({
      ...frame,
      models: frame.models.map((model) => ({
        ...model,
        workers: model.workers.map((worker, at) => (at === 0 ? { ...worker, state: "draining" } : worker)),
      })),
    });
    await note.getByText("2/4 workers").waitFor();
    assert.deepEqual(troubles, []);
  });

  test("landmarks, one h2 per panel, names for everything, no id twice", async () => {
    await using look = await open("overload");
    const { page } = look;
    assert.deepEqual(
      await page.evaluate("[...document.querySelectorAll('h1, main, header')].map((e) => e.localName)"),
      ["header", "h1", "main"],
    );
    const flaws = `[...document.querySelectorAll("main section.panel")]
      .filter((panel) => panel.checkVisibility() && (panel.querySelectorAll("h2").length !== 1 ||
        document.getElementById(panel.getAttribute("aria-labelledby"))?.textContent === ""))
      .map((panel) => panel.className)`;
    assert.deepEqual(await page.evaluate(flaws), []);
    const ids =
      "[...document.querySelectorAll('[id]')].map((each) => each.id).filter((id, at, all) => all.indexOf(id) !== at)";
    assert.deepEqual(await page.evaluate(ids), []);
    const nameless = `[...document.querySelectorAll("button, input, select, canvas[tabindex]")]
      .filter((each) => !each.hidden && !(each.getAttribute("aria-label") || each.textContent.trim() || each.labels?.length))
      .map((each) => each.outerHTML)`;
    assert.deepEqual(await page.evaluate(nameless), []);
    assert.equal(await page.locator("#announce[aria-live=polite]").count(), 1);
  });

  test("what has the focus shows it", async () => {
    await using look = await open("healthy");
    const { page } = look;
    const outline =
      "(() => { const s = getComputedStyle(document.activeElement); return s.outlineStyle + s.outlineWidth; })()";
    for (let i = 0; i < 14; i++) {
      await page.keyboard.press("Tab");
      assert.equal(
        await page.evaluate(outline),
        "solid2px",
        String(await page.evaluate("document.activeElement.outerHTML")),
      );
    }
  });

  for (const colorScheme of ["light", "dark"] as const) {
    test(`text has a contrast of 4.5 or more (${colorScheme})`, async () => {
      for (const scene of ["overload", "down"] as const) {
        await using look = await open(scene, { colorScheme });
        assert.deepEqual(await look.page.evaluate(FAINT_TEXT), [], scene);
      }
    });
  }
});

/** Elements with text of their own whose colour is too near to what lies behind them. */
const FAINT_TEXT = `(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(each).backgroundColor);
      if (a === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("body *")]
    .filter((node) => node.checkVisibility() && [...node.childNodes].some((c) => c.nodeType === 3 && c.data.trim() !== ""))
    .filter((node) => !node.closest(".sr, caption, option, noscript"))
    .map((node) => {
      const [front, back] = [light(parse(getComputedStyle(node).color)), light(ground(node))];
      const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
      return ratio < 4.5 ? node.localName + "." + node.className + " " + ratio.toFixed(2) + " " + node.textContent : "";
    })
    .filter((flaw) => flaw !== "");
})()`;

/** Seconds of CPU that the page's thread has used: what other programs do to the machine is not in it. */
async function threadSeconds(browser: CDPSession): Promise<number> {
  const { metrics } = await browser.send("Performance.getMetrics");
  return metrics.find(({ name }) => name === "TaskDuration")!.value;
}

test("10,000 requests/s on 70 workers leave the page's thread free", async (t) => {
  await using look = await open("crowd");
  const { page, troubles } = look;
  const browser = await page.context().newCDPSession(page);
  await browser.send("Performance.enable", { timeDomain: "threadTicks" });
  const from = Number(await page.evaluate("performance.now()"));
  const before = await threadSeconds(browser);
  await until(page, `performance.now() > ${from + 8000}`);
  const seconds = (Number(await page.evaluate("performance.now()")) - from) / 1000;
  const share = ((await threadSeconds(browser)) - before) / seconds;
  t.diagnostic(`the page's thread was busy for ${(100 * share).toFixed(0)} % of ${seconds.toFixed(1)} s`);
  // 16 frames came, and 240 pictures of the lanes; drawn in software.
  assert.ok(share < 0.5, `${(100 * share).toFixed(0)} %`);
  assert.deepEqual(troubles, []);
});
