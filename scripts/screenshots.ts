/**
 * Takes the pictures of the dashboard that the docs show: the real demo, with real load on it.
 *
 *   node scripts/screenshots.ts [FOLDER]      docs/, unless another folder is named; about two minutes
 *
 * Needs Chromium (on PATH as chromium, chromium-browser or google-chrome). Ferry runs with a simulated GPU on
 * free ports; some 1,650 requests/s come from here, one of eight a second time, so that the cache and joining have
 * something to do.
 */
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { setTimeout as pause } from "node:timers/promises";
import { type Browser, chromium } from "playwright-core";
import { Agent, request } from "undici";
import { findChromium } from "../test/e2e/chromium.ts";

const ROOT = join(import.meta.dirname, "..");
const into = process.argv[2] ?? join(ROOT, "docs");
const WARM_UP_MS = 50_000;
/** A page that opens takes the cores from Ferry for a moment, and the verdict says so for ten seconds. */
const SETTLE_MS = 16_000;
const STEP_MS = 10;

const CONFIG = {
  listen: "127.0.0.1:0",
  admin: { listen: "127.0.0.1:0" },
  models: [
    {
      name: "embed",
      backend: { kind: "simulated", workers: 4, baseMs: 100 },
      cache: { ttlMs: 300_000 },
    },
  ],
};

interface Running {
  readonly apiUrl: string;
  readonly adminUrl: string;
  stop(): Promise<void>;
}

async function startFerry(): Promise<Running> {
  const folder = await mkdtemp(join(tmpdir(), "ferry-pictures-"));
  const file = join(folder, "ferry.yaml");
  await writeFile(file, JSON.stringify(CONFIG));
  const child = spawn(join(ROOT, "bin/ferry"), ["serve", "-c", file], {
    stdio: ["ignore", "inherit", "pipe"],
  });
  const exited = once(child, "exit");
  for await (const line of createInterface({ input: child.stderr })) {
    const said = JSON.parse(line) as { msg?: string; listen?: string; admin?: string };
    if (said.msg !== "ready") continue;
    child.stderr.resume();
    const stop = async (): Promise<void> => {
      child.kill("SIGTERM");
      await exited;
      await rm(folder, { recursive: true, force: true });
    };
    return { apiUrl: said.listen ?? "", adminUrl: said.admin ?? "", stop };
  }
  throw new Error("Ferry ended before it was ready");
}

/** Open loop: as many as the wave says, whether or not those before are answered. */
async function load(apiUrl: string, until: AbortSignal): Promise<void> {
  const dispatcher = new Agent({ connections: 512, pipelining: 1 });
  const headers = { "content-type": "application/json" };
  let sent = 0;
  let due = 0;
  const startedAt = performance.now();
  let before = startedAt;
  while (!until.aborted) {
    const now = performance.now();
    const seconds = (now - startedAt) / 1000;
    due += ((now - before) / 1000) * (1650 + 160 * Math.sin(seconds / 9) + 50 * Math.sin(seconds * 1.3));
    before = now;
    for (; due >= 1; due--) {
      // One of eight asks what somebody asked a moment ago.
      const input = sent % 8 === 0 ? `again ${Math.floor(sent / 64)}` : `text ${sent}`;
      sent++;
      void request(`${apiUrl}/v1/inference`, {
        method: "POST",
        headers,
        body: JSON.stringify({ input }),
        dispatcher,
      })
        .then(({ body }) => body.dump())
        .catch(() => undefined);
    }
    await pause(STEP_MS);
  }
  await dispatcher.destroy();
}

async function takePictures(browser: Browser, adminUrl: string): Promise<void> {
  const picture = async (name: string, width: number, height: number, colorScheme: "light" | "dark") => {
    const page = await browser.newPage({ viewport: { width, height }, colorScheme });
    await page.goto(adminUrl);
    await page
      .locator("#ranges button")
      .first()
      .evaluate((button: { click(): void }) => button.click());
    await pause(SETTLE_MS);
    await page.screenshot({ path: join(into, name) });
    await page.close();
  };
  await picture("dashboard-1440.png", 1440, 900, "light");
  await picture("dashboard-dark.png", 1440, 900, "dark");
  await picture("dashboard-390.png", 390, 844, "light");
}

const browser = await chromium.launch({ executablePath: findChromium(), args: ["--no-sandbox"] });
const ferry = await startFerry();
const enough = new AbortController();
const loading = load(ferry.apiUrl, enough.signal);
try {
  await pause(WARM_UP_MS);
  await takePictures(browser, ferry.adminUrl);
} finally {
  enough.abort();
  await loading;
  await browser.close();
  await ferry.stop();
}
