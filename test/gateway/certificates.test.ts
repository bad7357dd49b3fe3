/** Certificates in files: what is refused at the start, and what happens when files change or run out. */
import assert from "node:assert/strict";
import { rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, describe, test } from "node:test";
import { setImmediate as turn } from "node:timers/promises";
import { Certificates, type CertificatePaths } from "../../src/gateway/certificates.ts";
import { type EventFields, Events } from "../../src/observe/events.ts";
import { ManualClock } from "../workers/backend/manual-clock.ts";
import { Authority, type Pair } from "../fixtures/certificates.ts";

const RELOAD_MS = 2000;
const DAY_MS = 86_400_000;
const authority = new Authority();
after(() => authority[Symbol.dispose]());

class Stage implements Disposable {
  readonly clock = new ManualClock(new Date().getTime());
  readonly events = new Events();
  readonly notices: EventFields["notice"][] = [];
  readonly certificates: Certificates;
  changes = 0;

  constructor(paths: CertificatePaths) {
    this.events.on("notice", (notice) => this.notices.push(notice));
    this.certificates = new Certificates("tls", paths, RELOAD_MS, this.clock, this.events);
    this.certificates.onChange(() => this.changes++);
  }

  /** Lets `reloadMs` pass and waits until the files have been looked at. */
  async look(ms = RELOAD_MS): Promise<void> {
    this.clock.advance(ms);
    while (this.clock.nextMs === Infinity) await turn();
  }

  take(): EventFields["notice"][] {
    return this.notices.splice(0);
  }

  [Symbol.dispose](): void {
    this.certificates.stop();
    assert.equal(this.clock.nextMs, Infinity, "nothing is left to ring");
  }
}

async function started(pair: Pair): Promise<Stage> {
  const stage = new Stage(pair);
  await stage.certificates.start();
  return stage;
}

function file(name: string, text: string): string {
  const path = join(authority.folder, name);
  writeFileSync(path, text);
  return path;
}

describe("what cannot be used is one line at the start", () => {
  const pair = authority.issue();
  const other = authority.issue();
  const damaged = pair.cert.replace(/\n[A-Za-z0-9+/]{64}\n/, "\nAAAA\n");
  const cases: [name: string, paths: CertificatePaths, message: RegExp][] = [
    [
      "no such file",
      { ...pair, certFile: join(authority.folder, "none") },
      /^tls\.certFile: .*no such file$/,
    ],
    ["a folder", { ...pair, keyFile: authority.folder }, /^tls\.keyFile: .*is a folder/],
    ["no PEM", { ...pair, certFile: file("text", "hello") }, /^tls\.certFile: holds no certificate in PEM/],
    ["nothing", { ...pair, keyFile: file("empty", "") }, /^tls\.keyFile: holds no private key in PEM/],
    [
      "another's key",
      { ...pair, keyFile: other.keyFile },
      /^tls\.keyFile: is not the key of the certificate/,
    ],
    ["a damaged certificate", { ...pair, certFile: file("damaged", damaged) }, /^tls\.certFile: .*damaged/],
    ["a key where an authority should be", { caFile: pair.keyFile }, /^tls\.caFile: holds no certificate/],
    [
      "half a key",
      { ...pair, keyFile: file("half", pair.key.slice(0, 90)) },
      /^tls\.keyFile: cannot be read/,
    ],
    [
      "a key with a passphrase",
      { ...pair, keyFile: file("secret", pair.key.replaceAll("PRIVATE", "ENCRYPTED PRIVATE")) },
      /^tls\.keyFile: the key has a passphrase/,
    ],
    [
      "a file without end",
      { ...pair, certFile: file("huge", "a".repeat(2 ** 20 + 1)) },
      /larger than 1 MiB$/,
    ],
  ];
  for (const [name, paths, message] of cases) {
    test(name, async () => {
      using stage = new Stage(paths);
      const error = await stage.certificates.start().then(
        () => assert.fail("started"),
        (failure: Error) => failure,
      );
      assert.match(error.message, message);
      assert.doesNotMatch(error.message, /\n/);
    });
  }
});

describe("files that change", () => {
  test("are used, and that is said", async () => {
    const [pair, next] = [authority.issue(), authority.issue()];
    using stage = await started(pair);
    await stage.look();
    assert.deepEqual([stage.changes, stage.take()], [0, []]);
    authority.replace(pair, next);
    await stage.look();
    assert.equal(stage.changes, 1);
    assert.equal(stage.certificates.material.cert, next.cert);
    assert.match(stage.take()[0]!.message, /^tls: the files changed and are used from now on; .* ends on 20/);
  });

  test("one after the other: the old pair stays, one warning, then the new pair", async () => {
    const [pair, next] = [authority.issue(), authority.issue()];
    using stage = await started(pair);
    writeFileSync(pair.certFile, next.cert);
    for (let looks = 0; looks < 3; looks++) await stage.look();
    assert.deepEqual(
      stage.take().map(({ level, message }) => [level, message]),
      [
        [
          "warn",
          "tls.keyFile: is not the key of the certificate in tls.certFile; what was read before stays in use",
        ],
      ],
    );
    assert.equal(stage.certificates.material.cert, pair.cert);
    writeFileSync(pair.keyFile, next.key);
    await stage.look();
    assert.equal(stage.certificates.material.cert, next.cert);
    assert.equal(stage.changes, 1);
  });

  test("and go: the old pair stays, and its return is not a change", async () => {
    const pair = authority.issue();
    using stage = await started(pair);
    rmSync(pair.keyFile);
    await stage.look();
    await stage.look();
    assert.deepEqual(
      stage.take().map(({ level }) => level),
      ["warn"],
    );
    writeFileSync(pair.keyFile, pair.key);
    await stage.look();
    assert.deepEqual([stage.changes, stage.take()], [0, []]);
    rmSync(pair.keyFile);
    await stage.look();
    assert.equal(stage.take().length, 1, "gone again is told again");
  });
});

describe("a certificate that ends", () => {
  test("within 14 days is told at the start and once a day", async () => {
    using stage = await started(authority.issue({ days: 5 }));
    assert.match(
      stage.take()[0]!.message,
      /^tls\.certFile: the certificate ends on 20.*, in [45] days; renew it$/,
    );
    await stage.look();
    assert.deepEqual(stage.take(), []);
    await stage.look(DAY_MS);
    assert.match(stage.take()[0]!.message, /in [34] days/);
    await stage.look(5 * DAY_MS);
    const [ended] = stage.take();
    assert.equal(ended!.level, "error");
    assert.match(ended!.message, /ended on 20.*renew it now/);
  });

  test("later is told when it gets there, and no more once it is renewed", async () => {
    const pair = authority.issue({ days: 30 });
    using stage = await started(pair);
    await stage.look(15 * DAY_MS);
    assert.deepEqual(stage.take(), []);
    await stage.look(2 * DAY_MS);
    assert.equal(stage.take().length, 1);
    authority.replace(pair, authority.issue({ days: 300 }));
    await stage.look(DAY_MS);
    assert.deepEqual(
      stage.take().map(({ level }) => level),
      ["info"],
    );
  });
});
