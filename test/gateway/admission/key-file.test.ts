/** Keys in a file: written whole, read again when it changed, never lost. */
import assert from "node:assert/strict";
import {
  chmodSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { describe, test } from "node:test";
import { setImmediate as turn } from "node:timers/promises";
import { KeyFile } from "../../../src/gateway/admission/key-file.ts";
import { PublicKeyFile } from "../../../src/gateway/admission/tokens.ts";
import { SystemClock } from "../../../src/app/clock.ts";
import { VirtualClock } from "../../../src/cli/plan/virtual-clock.ts";
import { Events } from "../../../src/observe/events.ts";
import { ManualClock } from "../../workers/backend/manual-clock.ts";
import { makeKey, notices, pem, rsaPair } from "./stage.ts";

const RELOAD_MS = 5000;

class Stage implements AsyncDisposable {
  readonly clock = new VirtualClock();
  readonly events = new Events();
  readonly notices = notices(this.events);
  readonly folder: string;
  readonly path: string;
  readonly file: KeyFile;

  private constructor(folder: string) {
    this.folder = folder;
    this.path = join(folder, "keys.json");
    this.file = new KeyFile({ path: this.path, reloadMs: RELOAD_MS }, this.clock, this.events);
  }

  static async make(): Promise<Stage> {
    return new Stage(await mkdtemp(join(tmpdir(), "ferry-keys-")));
  }

  /** Another process: it has its own idea of time. */
  other(): KeyFile {
    return new KeyFile({ path: this.path, reloadMs: RELOAD_MS }, new SystemClock(), new Events());
  }

  /** Until the file was looked at after the next alarm: nothing announces a look that finds nothing. */
  async looked(seen: () => boolean): Promise<void> {
    await this.clock.run(this.clock.now() + RELOAD_MS + 1);
    for (let turns = 0; !seen(); turns++) {
      assert.ok(turns < 10_000, "it was never seen");
      await new Promise((resolve) => setImmediate(resolve));
      await this.clock.run(this.clock.now());
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.file.close();
    await rm(this.folder, { recursive: true });
  }
}

const BROKEN = ["", "{", "null", "[]", '{"version":2,"keys":[]}', '{"version":1,"keys":[{"id":"x"}]}'];
const mode = (path: string): number => statSync(path).mode & 0o777;

/** A key on its way into the file. `later`: time passes while it waits, not while it reads; true when it is in. */
function adding({ path, events }: Stage): { clock: ManualClock; later: () => Promise<boolean | void> } {
  const clock = new ManualClock();
  const file = new KeyFile({ path, reloadMs: RELOAD_MS }, clock, events);
  const added = file.add(makeKey("u1", "paid").record).then(() => true);
  const later = async (): Promise<boolean | void> => {
    const done = await Promise.race([added, turn()]);
    if (clock.nextMs < Infinity) clock.advance(100);
    return done;
  };
  return { clock, later };
}

describe("a keys file", () => {
  test("is made for its owner alone, and holds no key", async () => {
    await using stage = await Stage.make();
    const { key, record } = makeKey("u1", "paid");
    await stage.file.add(record);
    assert.equal(mode(stage.path), 0o600);
    const text = readFileSync(stage.path, "utf8");
    assert.ok(!text.includes(key) && !text.includes(key.slice(20, 48)));
    assert.deepEqual(await stage.file.list(), [record]);
    assert.deepEqual(readdirSync(stage.folder), ["keys.json"]);
  });

  test("keeps the rights that it was given, and its place behind a link", async () => {
    await using stage = await Stage.make();
    const real = join(stage.folder, "real.json");
    writeFileSync(real, '{"version":1,"keys":[]}');
    chmodSync(real, 0o640);
    symlinkSync(real, stage.path);
    await stage.file.add(makeKey("u1", "paid").record);
    assert.equal(mode(real), 0o640);
    assert.equal((await stage.file.list()).length, 1);
    assert.deepEqual(readdirSync(stage.folder).sort(), ["keys.json", "real.json"]);
  });

  test("twenty at once lose nothing", async () => {
    await using stage = await Stage.make();
    const made = Array.from({ length: 20 }, (_, at) => makeKey(`u${at}`, "paid"));
    await Promise.all(made.map(({ record }) => stage.other().add(record)));
    const ids = (await stage.file.list()).map(({ id }) => id);
    assert.deepEqual(ids.sort(), made.map(({ record }) => record.id).sort());
  });

  test("a lock that was left behind is named, with what to do", async () => {
    await using stage = await Stage.make();
    writeFileSync(`${stage.path}.lock`, "4711\n");
    const { later } = adding(stage);
    await assert.rejects(async () => {
      while ((await later()) === undefined);
    }, /keys\.json\.lock is held by process 4711; if no ferry keys runs, remove the file/);
  });

  test("a lock that goes from one to the next is waited for", async () => {
    await using stage = await Stage.make();
    const lock = `${stage.path}.lock`;
    const { clock, later } = adding(stage);
    for (let holder = 1; holder <= 4; holder++) {
      writeFileSync(lock, `${holder}\n`);
      // Twice as long as it waits for one of them, in all.
      const until = clock.now() + 2500;
      while (clock.now() < until) assert.equal(await later(), undefined);
    }
    await rm(lock);
    while ((await later()) === undefined);
    assert.equal((await stage.file.list()).length, 1);
  });

  test("that is broken is never written over", async () => {
    await using stage = await Stage.make();
    for (const text of BROKEN) {
      writeFileSync(stage.path, text);
      await assert.rejects(
        stage.file.add(makeKey("u1", "paid").record),
        /cannot read .*keys\.json: it is not a keys file \(/,
      );
      assert.equal(readFileSync(stage.path, "utf8"), text);
    }
  });

  test("that was edited is read only if every key in it still has one id and one user", async () => {
    await using stage = await Stage.make();
    const { record } = makeKey("u1", "paid");
    await stage.file.add(record);
    const text = readFileSync(stage.path, "utf8");
    const { keys } = JSON.parse(text) as { keys: object[] };
    writeFileSync(stage.path, JSON.stringify({ version: 1, keys: [...keys, { ...keys[0], user: "u2" }] }));
    await assert.rejects(stage.file.list(), new RegExp(`keys\\[1\\] has the id of another, ${record.id}`));
    for (const user of ["", "a\\u001b[31m", "\\ud800", "a".repeat(256)]) {
      writeFileSync(stage.path, text.replace('"u1"', `"${user}"`));
      await assert.rejects(stage.file.list(), /keys\[0\] is no record of a key/);
    }
  });

  test("revoking one leaves the others; one that is not there is told", async () => {
    await using stage = await Stage.make();
    assert.equal(await stage.file.revoke("nobody"), false);
    const [one, two] = [makeKey("u1", "paid").record, makeKey("u1", "free").record];
    await stage.file.add(one);
    await stage.file.add(two);
    assert.equal(await stage.file.revoke(one.id), true);
    assert.equal(await stage.file.revoke(one.id), false);
    assert.deepEqual(await stage.file.list(), [two]);
  });
});

describe("a running Ferry", () => {
  test("does not start with a file that it cannot read: there are no keys from before", async () => {
    for (const text of BROKEN) {
      await using stage = await Stage.make();
      writeFileSync(stage.path, text);
      await assert.rejects(stage.file.watch(), /^Error: auth\.keysFile .*keys\.json: it is not a keys file/);
      assert.deepEqual(stage.notices, []);
    }
    await using stage = await Stage.make();
    mkdirSync(stage.path);
    await assert.rejects(stage.file.watch(), /keys\.json: it is not a file$/);
  });

  test("sees a new key, and a revoked one, at its next look", async () => {
    await using stage = await Stage.make();
    await stage.file.watch();
    assert.match(stage.notices[0]!.message, /there is no such file yet: no key works; ferry keys create/);
    const { record } = makeKey("u1", "paid");
    await stage.other().add(record);
    await stage.looked(() => stage.file.get(record.id) !== undefined);
    assert.deepEqual(stage.file.get(record.id), record);
    await stage.other().revoke(record.id);
    await stage.looked(() => stage.file.get(record.id) === undefined);
    assert.equal(stage.notices.length, 1);
  });

  test("keeps the last good keys when the file is broken, says so once, and recovers", async () => {
    await using stage = await Stage.make();
    const { record } = makeKey("u1", "paid");
    await stage.file.add(record);
    await stage.file.watch();
    const good = readFileSync(stage.path);
    writeFileSync(stage.path, "{ broken");
    await stage.looked(() => stage.notices.length > 0);
    for (let i = 0; i < 3; i++) await stage.looked(() => true);
    assert.deepEqual(stage.file.get(record.id), record);
    assert.equal(stage.notices.length, 1);
    assert.match(stage.notices[0]!.message, /is not a keys file \(.*\); the last good keys stay in force/);
    const second = makeKey("u2", "free").record;
    writeFileSync(stage.path, good);
    await stage.file.add(second);
    await stage.looked(() => stage.file.get(second.id) !== undefined);
  });

  test("a file that is gone means no keys, and is said", async () => {
    await using stage = await Stage.make();
    const { record } = makeKey("u1", "paid");
    await stage.file.add(record);
    await stage.file.watch();
    await rm(stage.path);
    await stage.looked(() => stage.file.get(record.id) === undefined);
    assert.match(stage.notices[0]!.message, /it is gone: no key works/);
  });
});

describe("the secret beside it", () => {
  test("is made once, for its owner alone, also by ten at once", async () => {
    await using stage = await Stage.make();
    const secrets = await Promise.all(Array.from({ length: 10 }, () => stage.other().secret()));
    assert.equal(new Set(secrets).size, 1);
    assert.ok(secrets[0]!.length >= 43);
    assert.equal(mode(`${stage.path}.secret`), 0o600);
    assert.equal(await stage.other().secret(), secrets[0]);
    assert.deepEqual(readdirSync(stage.folder), ["keys.json.secret"]);
  });

  test("that is no secret is refused rather than used", async () => {
    await using stage = await Stage.make();
    writeFileSync(`${stage.path}.secret`, "short\n");
    await assert.rejects(
      stage.file.secret(),
      /cannot read .*keys\.json\.secret: it is not a secret that Ferry made/,
    );
  });
});

test("a public key file: none is one line at the start; a new one is taken, a broken one is not", async () => {
  await using stage = await Stage.make();
  const path = join(stage.folder, "jwt.pem");
  const open = () => PublicKeyFile.open(path, "RS256", RELOAD_MS, stage.clock, stage.events);
  await assert.rejects(open(), /^Error: auth\.jwt\.publicKeyFile .*jwt\.pem: there is no such file$/);
  const [one, two] = [rsaPair(), rsaPair()];
  writeFileSync(path, pem(one));
  const keys = await open();
  assert.ok(keys.find()!.equals(one.publicKey));
  writeFileSync(path, "broken");
  await stage.looked(() => stage.notices.length > 0);
  assert.match(
    stage.notices[0]!.message,
    /no public key in PEM.*the key that was read before stays in force/,
  );
  writeFileSync(path, pem(two));
  await stage.looked(() => keys.find()!.equals(two.publicKey));
  keys.close();
});
