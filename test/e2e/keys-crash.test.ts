/** `ferry keys` is killed at any moment: no key that was shown is lost, and the file is never broken. */
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync, readFileSync, rmSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { Folder, ROOT, runFerry, writeConfig } from "./harness.ts";

const KILLS = 10;

test("kill -9 in the middle of keys create, ten times", async () => {
  await using folder = await Folder.make();
  const keysFile = join(folder.path, "keys.json");
  const config = await writeConfig(folder, {
    auth: { mode: "required", keysFile },
    models: [{ name: "m", backend: { kind: "simulated" } }],
  });
  const shown: string[] = [];
  const create = (user: string) =>
    spawn(join(ROOT, "bin/ferry"), ["keys", "create", "--user", user, "--tier", "paid", "-c", config]);
  for (let round = 0; round < KILLS; round++) {
    const child = create(`killed ${round}`);
    let out = "";
    child.stdout.on("data", (text: Buffer) => (out += text.toString()));
    const exited = once(child, "close");
    // From before it has read its config to after it is done.
    await Promise.race([exited, pause(60 + 30 * round)]);
    child.kill("SIGKILL");
    await exited;
    if (out.trim() !== "") shown.push(`killed ${round}`);
    if (existsSync(keysFile))
      assert.doesNotThrow(() => JSON.parse(readFileSync(keysFile, "utf8")) as unknown);
    // What the error of the next one says to do.
    rmSync(`${keysFile}.lock`, { force: true });
  }
  const whole = await runFerry(["keys", "create", "--user", "after", "--tier", "paid", "-c", config]);
  assert.equal(whole.code, 0, whole.stderr);
  const list = await runFerry(["keys", "list", "--json", "-c", config]);
  const users = list.stdout
    .trim()
    .split("\n")
    .map((row) => (JSON.parse(row) as { user: string }).user);
  for (const user of [...shown, "after"]) assert.ok(users.includes(user), `${user} was shown and is gone`);
  assert.equal(new Set(users).size, users.length);
});
