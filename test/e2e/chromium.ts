/** A real browser for the dashboard's tests: the Chromium of the machine, without a screen. */
import { accessSync, constants } from "node:fs";
import { delimiter, join } from "node:path";
import { type Browser, type BrowserContextOptions, chromium, type Page } from "playwright-core";
import { eventually, SOON_MS } from "./harness.ts";

const NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

export function findChromium(): string {
  for (const folder of (process.env["PATH"] ?? "").split(delimiter)) {
    for (const name of NAMES) {
      try {
        accessSync(join(folder, name), constants.X_OK);
        return join(folder, name);
      } catch {
        // The next one.
      }
    }
  }
  throw new Error("no Chromium on PATH: install it (Debian: apt-get install chromium)");
}

/** A browser, and what went wrong on each page of it. */
export class Eyes implements AsyncDisposable {
  readonly #browser: Browser;

  private constructor(browser: Browser) {
    this.#browser = browser;
  }

  static async open(): Promise<Eyes> {
    // Chromium's own sandbox does not work for root, as which containers run.
    const browser = await chromium.launch({
      executablePath: findChromium(),
      args: ["--no-sandbox"],
      timeout: SOON_MS,
    });
    return new Eyes(browser);
  }

  /** Opens `url`; `troubles` collects errors, warnings, failed requests, and requests that leave `url`'s origin. */
  async look(url: string, options: BrowserContextOptions = {}): Promise<Look> {
    const context = await this.#browser.newContext({ viewport: { width: 1440, height: 900 }, ...options });
    const page = await context.newPage();
    page.setDefaultTimeout(SOON_MS);
    const troubles: string[] = [];
    const { origin } = new URL(url);
    page.on("console", (message) => {
      if (message.type() !== "log") troubles.push(`${message.type()}: ${message.text()}`);
    });
    page.on("pageerror", (error) => troubles.push(`uncaught: ${error.message}`));
    page.on("requestfailed", (request) => troubles.push(`failed: ${request.url()}`));
    page.on("request", (request) => {
      if (new URL(request.url()).origin !== origin) troubles.push(`left: ${request.url()}`);
    });
    await page.goto(url);
    return { page, troubles, [Symbol.asyncDispose]: () => context.close() };
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#browser.close();
  }
}

/** Asks the page until the expression holds; `waitForFunction` does not get past the page's security policy. */
export function until(page: Page, expression: string, withinMs = SOON_MS): Promise<void> {
  return eventually(async () => (await page.evaluate(expression)) === true, withinMs).catch(
    (error: unknown) => {
      throw new Error(`never so: ${expression}`, { cause: error });
    },
  );
}

/** What was last known is drawn: some frames have passed. */
export async function drawn(page: Page): Promise<void> {
  await page.evaluate(`new Promise((resolve) => {
    let frames = 0;
    const next = () => (++frames > 6 ? resolve(true) : requestAnimationFrame(next));
    next();
  })`);
}

export interface Look extends AsyncDisposable {
  readonly page: Page;
  readonly troubles: string[];
}
