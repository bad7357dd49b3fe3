/** Keys, tiers and rates that a reload changes under load: they hold from the next request on, and nobody else notices. */
import assert from "node:assert/strict";
import { copyFile, readFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { type Config, Ferry, Folder, type Headers, runFerry, writeConfig } from "./harness.ts";
import { Stream } from "./steady-load.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

const bearer = (key: string): Headers => ({ authorization: `Bearer ${key}` });

async function createKey(folder: Folder, user: string, tier: string): Promise<string> {
  const config = join(folder.path, "ferry.yaml");
  const made = await runFerry(["keys", "create", "--user", user, "--tier", tier, "-c", config]);
  assert.equal(made.code, 0, made.stderr);
  return made.stdout.trim();
}

async function reload(ferry: Ferry, folder: Folder, config: Config): Promise<void> {
  await writeConfig(folder, config);
  const answer = await ferry.admin("/internal/reload", "POST");
  assert.equal(answer.status, 200, answer.text);
}

/** Statuses of so many requests, one after the other, each with its own output where it has one. */
async function ask(ferry: Ferry, key: string, count: number): Promise<number[]> {
  const statuses: number[] = [];
  for (let at = 0; at < count; at++) {
    const input = `${key.slice(-6)} ${at}`;
    const answer = await ferry.post({ input }, bearer(key));
    if (answer.status === 200) assert.deepEqual(answer.json.output, { of: input });
    statuses.push(answer.status);
  }
  return statuses;
}

test("keys, rates of tiers and of users: new ones hold at once, and a load beside them loses nothing", async () => {
  await using folder = await Folder.make();
  await using stub = await StubWorker.listen((call) => void setTimeout(() => call.echo(), 2));
  const config = (paidPerMinute: number, more: object = {}, limits: object = {}): Config => ({
    models: [stubModel([stub], { cache: { scope: "off" }, collapse: false })],
    auth: { mode: "required", keysFile: "./keys.json", ...more },
    tiers: {
      gold: {},
      paid: { ratePerMinute: paidPerMinute },
      free: { ratePerMinute: 1_000_000 },
    },
    limits: { perUserPerMinute: 1_000_000, ...limits },
  });
  await writeConfig(folder, config(1_000_000));
  const [gold, paid, free] = [
    await createKey(folder, "g", "gold"),
    await createKey(folder, "p", "paid"),
    await createKey(folder, "f", "free"),
  ];
  await using ferry = await Ferry.start(config(1_000_000), folder);
  const port = Number(new URL(ferry.url).port);
  await using load = new Stream({ port, perSecond: 150, headers: bearer(gold) });
  await load.more(50);

  assert.deepEqual(new Set(await ask(ferry, paid, 10)), new Set([200]));
  await reload(ferry, folder, config(3));
  const limited = await ask(ferry, paid, 8);
  // The minute that runs goes on: what was used of it counts.
  assert.ok(limited.filter((status) => status === 200).length <= 3, String(limited));
  assert.equal(limited.at(-1), 429);
  assert.deepEqual(new Set(await ask(ferry, free, 10)), new Set([200]), "other tiers do not notice");
  await reload(ferry, folder, config(1_000_000));
  assert.deepEqual(new Set(await ask(ferry, paid, 10)), new Set([200]), "at once");

  // Another file: one key less, one more. The file that is in use is not written.
  for (const end of ["", ".secret"]) {
    await copyFile(join(folder.path, `keys.json${end}`), join(folder.path, `next.json${end}`));
  }
  const other = config(1_000_000, { keysFile: "./next.json" });
  await writeConfig(folder, other);
  const revoked = await runFerry(["keys", "revoke", paid, "-c", join(folder.path, "ferry.yaml")]);
  assert.equal(revoked.code, 0, revoked.stderr);
  const late = await createKey(folder, "l", "free");
  assert.deepEqual([(await ask(ferry, paid, 1))[0], (await ask(ferry, late, 1))[0]], [200, 401]);
  await reload(ferry, folder, other);
  assert.deepEqual([(await ask(ferry, paid, 1))[0], (await ask(ferry, late, 1))[0]], [401, 200]);
  await reload(ferry, folder, config(1_000_000));
  assert.deepEqual([(await ask(ferry, paid, 1))[0], (await ask(ferry, late, 1))[0]], [200, 401]);

  await load.more(50);
  await load.stop();
  assert.deepEqual(load.failed, [], load.told());
  // This one is everybody's.
  await reload(ferry, folder, config(1_000_000, {}, { perUserPerMinute: 12 }));
  const perUser = await ask(ferry, free, 8);
  assert.equal(perUser.at(-1), 429, String(perUser));
  await reload(ferry, folder, config(1_000_000));
  assert.equal((await ask(ferry, free, 1))[0], 200);
  assert.doesNotMatch(ferry.stderr(), new RegExp([gold, paid, free, late].join("|")));
});

test("rates that flap in the middle of everybody's requests: only those that are limited are ever refused", async () => {
  await using folder = await Folder.make();
  await using stub = await StubWorker.listen((call) => void setTimeout(() => call.echo(), 2));
  const config = (ratePerMinute: number | undefined): Config => ({
    models: [stubModel([stub], { cache: { scope: "off" }, collapse: false })],
    auth: { mode: "required", keysFile: "./keys.json" },
    tiers: { gold: {}, paid: ratePerMinute === undefined ? {} : { ratePerMinute } },
    limits: { perUserPerMinute: 1_000_000 },
  });
  await writeConfig(folder, config(1));
  const [gold, paid] = [await createKey(folder, "g", "gold"), await createKey(folder, "p", "paid")];
  await using ferry = await Ferry.start(config(1_000_000), folder);
  const port = Number(new URL(ferry.url).port);
  await using free = new Stream({ port, perSecond: 100, headers: bearer(gold) });
  await using bounded = new Stream({ port, perSecond: 100, headers: bearer(paid) });
  for (let round = 0; round < 12; round++) {
    await reload(ferry, folder, config([1_000_000, 1, 500_000][round % 3]));
    await pause(60);
  }
  await reload(ferry, folder, config(1_000_000));
  const refused = bounded.failed.length;
  await bounded.more(30);
  await Promise.all([free.stop(), bounded.stop()]);
  assert.deepEqual(free.failed, [], free.told());
  assert.ok(
    bounded.failed.length > 0 && bounded.failed.every((what) => what.startsWith("429 ")),
    bounded.told(),
  );
  assert.ok(bounded.failed.length - refused <= 5, "after the last reload only those that were on their way");
  // Nobody's secret is where the config is told.
  assert.doesNotMatch(await readFile(ferry.configFile, "utf8"), new RegExp(`${gold}|${paid}`));
});
