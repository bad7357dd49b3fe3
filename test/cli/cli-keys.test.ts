/** `ferry keys`, from outside, with a keys file; on Redis see e2e/redis-auth.test.ts. */
import assert from "node:assert/strict";
import { existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { describe, test } from "node:test";
import { readApiKey } from "../../src/gateway/admission/api-keys.ts";
import { bin, ferryIn, folder, run, type Ended } from "./cli-child.ts";

const MODELS = "models: [{ name: a, backend: { kind: simulated } }]\n";

/** A folder with a config of its own, and `ferry` in it. */
class Place {
  static #count = 0;
  readonly path = join(folder, `keys-${++Place.#count}`);

  constructor(auth: string) {
    mkdirSync(this.path);
    writeFileSync(join(this.path, "ferry.yaml"), auth + MODELS);
  }

  ferry(...args: string[]): Promise<Ended> {
    return ferryIn(this.path, args);
  }

  create(...more: string[]): Promise<Ended> {
    return this.ferry("keys", "create", "--user", "u1", "--tier", "paid", ...more);
  }

  file(name: string): string {
    return join(this.path, name);
  }
}

const required = (): Place => new Place("auth: { mode: required, keysFile: ./keys.json }\n");

describe("ferry keys create", () => {
  test("prints the key alone, and says on stderr that it is not shown again", async () => {
    const place = required();
    const { code, out, err } = await place.create();
    assert.equal(code, 0);
    const id = readApiKey(out.trimEnd());
    assert.equal(out, `${out.trimEnd()}\n`);
    assert.equal(err, `  Key ${id} of u1, tier paid. It is not shown again.\n`);
    assert.ok(!readFileSync(place.file("keys.json"), "utf8").includes(out.slice(20, 48)));
  });

  test("--json: one object with everything but the digest", async () => {
    const { code, out } = await required().create("--name", "laptop", "--json");
    assert.equal(code, 0);
    const said = JSON.parse(out) as Readonly<Record<string, string>>;
    assert.deepEqual(Object.keys(said), ["id", "user", "tier", "name", "created_at", "key"]);
    assert.equal(readApiKey(said["key"]!), said["id"]);
    assert.equal(said["name"], "laptop");
  });

  test("an unknown tier is one line with those that there are, and nothing is made", async () => {
    const place = required();
    const { code, out, err } = await place.ferry("keys", "create", "--user", "u1", "--tier", "piad");
    assert.deepEqual([code, out], [1, ""]);
    assert.match(
      err,
      /^ferry: keys create: there is no tier piad; did you mean paid\?; tiers: enterprise, paid, free\n$/,
    );
    assert.ok(!existsSync(place.file("keys.json")));
  });

  test("with auth.mode none it works, and says that keys are not asked for yet", async () => {
    const { code, err } = await new Place("auth: { keysFile: ./keys.json }\n").create();
    assert.equal(code, 0);
    assert.match(err, /auth\.mode is none: keys are not asked for yet; set auth\.mode: required/);
  });

  test("without a place for keys it says which line to add", async () => {
    const { code, out, err } = await new Place("").create();
    assert.deepEqual([code, out], [1, ""]);
    assert.match(
      err,
      /the config has no place for keys; add auth: \{ mode: required, keysFile: \.\/keys\.json \}/,
    );
  });

  test("eight processes at once lose none", async () => {
    const place = required();
    const words = ["keys", "create", "--user", "u1", "--tier", "paid"];
    const made = await Promise.all(Array.from({ length: 8 }, () => run(bin, words, {}, place.path)));
    for (const { code, err } of made) assert.equal(code, 0, err);
    const { out } = await place.ferry("keys", "list", "--json");
    const ids = out
      .trim()
      .split("\n")
      .map((row) => (JSON.parse(row) as { id: string }).id);
    assert.deepEqual(ids.sort(), made.map((each) => readApiKey(each.out.trim())!).sort());
  });

  test("a file that is not a keys file, or may not be written, is one line and stays as it is", async () => {
    const place = required();
    writeFileSync(place.file("keys.json"), "hello");
    const { code, out, err } = await place.create();
    assert.deepEqual([code, out], [1, ""]);
    assert.match(
      err,
      /^ferry: keys create: cannot read .*keys\.json: it is not a keys file \(no JSON: cut off, or edited\)\n$/,
    );
    assert.equal(readFileSync(place.file("keys.json"), "utf8"), "hello");
    const nowhere = new Place("auth: { mode: required, keysFile: ./none/keys.json }\n");
    const other = await nowhere.create();
    assert.equal(other.code, 1);
    assert.match(
      other.err,
      /^ferry: keys create: cannot write .*none\/keys\.json\.secret: there is no such folder.*\n$/,
    );
  });
});

describe("ferry keys list and revoke", () => {
  test("none is said; some are a table, without a digest", async () => {
    const place = required();
    assert.deepEqual(await place.ferry("keys", "list"), { code: 0, out: "no keys\n", err: "" });
    assert.ok(!existsSync(place.file("keys.json.secret")), "looking makes nothing");
    const key = (await place.create("--name", "laptop")).out.trim();
    const { code, out, err } = await place.ferry("keys", "list");
    assert.equal(code, 0);
    assert.match(
      out,
      new RegExp(`^  ID +USER +TIER +AGE +NAME\n  ${readApiKey(key)} +u1 +paid +\\d+ s +laptop\n$`),
    );
    assert.match(err, /^ {2}1 key\./);
    const { digest } = (
      JSON.parse(readFileSync(place.file("keys.json"), "utf8")) as { keys: { digest: string }[] }
    ).keys[0]!;
    const json = await place.ferry("keys", "list", "--json");
    assert.ok(!`${out}${json.out}`.includes(digest));
  });

  test("revoke takes an id, or the key itself where that was found; a second time it is not there", async () => {
    const place = required();
    const keys = [(await place.create()).out.trim(), (await place.create()).out.trim()];
    const byId = await place.ferry("keys", "revoke", readApiKey(keys[0]!)!);
    assert.deepEqual([byId.code, byId.out], [0, `revoked ${readApiKey(keys[0]!)}\n`]);
    assert.match(byId.err, /takes it for at most 5 s more/);
    assert.equal(
      (await place.ferry("keys", "revoke", keys[1]!, "--json")).out,
      `{"id":"${readApiKey(keys[1]!)}","revoked":true}\n`,
    );
    const again = await place.ferry("keys", "revoke", keys[0]!);
    assert.deepEqual([again.code, again.out], [1, ""]);
    assert.match(again.err, /there is no key .*; ferry keys list shows them/);
    assert.ok(!again.err.includes(keys[0]!));
  });

  test("a list that is longer than a pipe is not cut off", async () => {
    const place = required();
    await place.create();
    const { version, keys } = JSON.parse(readFileSync(place.file("keys.json"), "utf8")) as {
      version: number;
      keys: object[];
    };
    const many = Array.from({ length: 5000 }, (_, at) => ({ ...keys[0], id: `key${at}` }));
    writeFileSync(place.file("keys.json"), JSON.stringify({ version, keys: many }));
    const counted = await run("sh", ["-c", '"$0" keys list --json | wc -l', bin], {}, place.path);
    assert.equal(Number(counted.out), 5000);
  });

  test("keys of another secret are pointed out", async () => {
    const place = required();
    const key = (await place.create()).out.trim();
    const secret = "x".repeat(40);
    writeFileSync(
      place.file("ferry.yaml"),
      `auth: { mode: required, keysFile: ./keys.json, secret: ${secret} }\n${MODELS}`,
    );
    const { err } = await place.ferry("keys", "list");
    assert.match(
      err,
      new RegExp(`Made with another auth\\.secret, so that they do not work: ${readApiKey(key)}\n`),
    );
    assert.ok(!err.includes(secret));
  });
});

describe("ferry check", () => {
  test("warns while there is no keys file, and is content when there is", async () => {
    const place = required();
    const before = await place.ferry("check");
    assert.equal(before.code, 0);
    assert.match(
      before.err,
      /auth\.keysFile +warning: there is no such file, so no key works; ferry keys create/,
    );
    await place.create();
    assert.equal((await place.ferry("check")).err, "");
  });

  test("finds a keys file that cannot be read; serve does not start with it", async () => {
    const place = required();
    writeFileSync(place.file("keys.json"), '{"version":1,"keys":[{');
    const { code, out } = await place.ferry("check");
    assert.equal(code, 1);
    assert.match(out, /auth\.keysFile +cannot read .*keys\.json: it is not a keys file/);
    const serve = await place.ferry("serve");
    assert.deepEqual([serve.code, serve.out], [1, ""]);
    assert.match(serve.err, /^ferry: auth\.keysFile .*keys\.json: it is not a keys file \(no JSON/m);
  });

  test("a secret that cannot be used is told before the start stumbles over it", async () => {
    const place = required();
    await place.create();
    writeFileSync(place.file("keys.json.secret"), "short\n");
    const { code, out } = await place.ferry("check");
    assert.equal(code, 1);
    assert.match(out, /auth\.keysFile +cannot read .*keys\.json\.secret: it is not a secret that Ferry made/);
  });

  test("finds a public key that cannot be used", async () => {
    const jwt = "jwt: { publicKeyFile: ./jwt.pem, issuer: i, audience: a }";
    const place = new Place(`auth: { mode: required, ${jwt} }\n`);
    const missing = await place.ferry("check");
    assert.equal(missing.code, 1);
    assert.match(missing.out, /auth\.jwt\.publicKeyFile +there is no such file/);
    writeFileSync(place.file("jwt.pem"), "hello");
    assert.match((await place.ferry("check")).out, /it holds no public key in PEM/);
    const serve = await place.ferry("serve");
    assert.equal(serve.code, 1);
    assert.match(serve.err, /^ferry: auth\.jwt\.publicKeyFile .*jwt\.pem: it holds no public key in PEM/m);
  });
});
