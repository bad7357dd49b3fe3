/**
 * Builds the image and looks whether it keeps what the Dockerfile promises, with Docker or Podman:
 *
 *   node scripts/check-image.ts                                  with docker, where there is one, else podman
 *   node scripts/check-image.ts --with podman                    with this one
 *   node scripts/check-image.ts --image registry.example/ferry:1 builds nothing, and looks at that one
 *   node scripts/check-image.ts -- --build-arg NODE=my-node      what stands behind -- goes to `build`
 *
 * Two containers, one after the other, both without a network and without capabilities: the first has a read-only root,
 * the second may write, and neither has written when it is stopped. Clients run in containers beside them, which share
 * their loopback. Takes a minute or two, most of it `npm ci`; leaves the image `ferry:check`. Exit 1 when one thing is not so.
 */
import { spawn, spawnSync } from "node:child_process";
import { chmodSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { once } from "node:events";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { parseArgs } from "node:util";

const ROOT = join(import.meta.dirname, "..");
const ID = "10001";
const GRACE_S = 30;
/** How long a batch takes: a request is stopped on in the middle of it. */
const BATCH_MS = 2000;
const CONFIG = `listen: 0.0.0.0:8080
engine: { kind: memory DATA}
models:
  - name: echo
    backend: { kind: simulated, baseMs: ${BATCH_MS} }
`;

/** In a container of its own: waits until Ferry is ready, says so, asks, and prints what it was told. */
const CLIENT = `
for (let left = 100; ; left--) {
  const ready = await fetch("http://127.0.0.1:8081/readyz").then(({ ok }) => ok, () => false);
  if (ready) break;
  if (left === 0) throw new Error("not ready after 10 s");
  await new Promise((done) => setTimeout(done, 100));
}
const body = JSON.stringify({ model: "echo", input: process.argv[1] });
const headers = { "content-type": "application/json" };
const asked = fetch("http://127.0.0.1:8080/v1/inference", { method: "POST", headers, body });
// It is being held once others are answered on the same listener after it.
await fetch("http://127.0.0.1:8080/v1/nothing");
console.log("asked");
const answer = await asked;
console.log(answer.status, (await answer.json()).output);
`;

interface Ended {
  readonly status: number | null;
  readonly text: string;
}

class Box {
  readonly #tool: string;
  readonly #folder = mkdtempSync(join(tmpdir(), "ferry-image-"));
  readonly #names: string[] = [];
  failed = 0;

  constructor(tool: string) {
    this.#tool = tool;
    chmodSync(this.#folder, 0o755);
  }

  call(...words: readonly string[]): Ended {
    const { status, stdout, stderr, error } = spawnSync(this.#tool, words, { encoding: "utf8" });
    if (error !== undefined) throw error;
    return { status, text: `${stdout}${stderr}`.trim() };
  }

  /** What must work for anything else to make sense. */
  must(...words: readonly string[]): string {
    const { status, text } = this.call(...words);
    if (status !== 0) throw new Error(`${this.#tool} ${words.join(" ")}: ${text}`);
    return text;
  }

  build(image: string, words: readonly string[]): void {
    const { status } = spawnSync(this.#tool, ["build", "-t", image, ...words, ROOT], { stdio: "inherit" });
    if (status !== 0) throw new Error(`${this.#tool} build failed; what it said stands above`);
  }

  check(what: string, kept: boolean, found = ""): void {
    if (!kept) this.failed += 1;
    console.error(`${kept ? "✔" : "✖"} ${what}${kept || found === "" ? "" : `: ${found}`}`);
  }

  config(name: string, data = ""): string {
    const file = join(this.#folder, `${name}.yaml`);
    writeFileSync(file, CONFIG.replace(" DATA", data), { mode: 0o644 });
    return file;
  }

  start(name: string, image: string, config: string, ...words: readonly string[]): string {
    const container = `${name}-${process.pid}`;
    this.#names.push(container);
    const given = `${config}:/etc/ferry/ferry.yaml:ro`;
    const closed = ["--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"];
    this.must("run", "--detach", "--name", container, ...closed, "--volume", given, ...words, image);
    return container;
  }

  /** Asks from beside the container; `meanwhile` happens while the request is held. */
  async ask(container: string, image: string, input: string, meanwhile: () => void): Promise<string> {
    const beside = ["run", "--rm", "--network", `container:${container}`, "--entrypoint", "node", image];
    const script = ["--input-type=module", "--eval", CLIENT, input];
    const client = spawn(this.#tool, [...beside, ...script], { stdio: ["ignore", "pipe", "pipe"] });
    let text = "";
    client.stdout.on("data", (chunk: Buffer) => {
      const before = text.includes("asked\n");
      text += chunk.toString();
      if (!before && text.includes("asked\n")) meanwhile();
    });
    client.stderr.on("data", (chunk: Buffer) => (text += chunk.toString()));
    await once(client, "close");
    return text.replace(/^asked\n/, "").trim();
  }

  /** What is in the container that was not in the image, but for where its config is mounted. */
  written(container: string): string {
    const lines = this.must("diff", container).split("\n");
    return lines.filter((line) => !/^$|^[AC] \/etc(\/ferry(\/ferry\.yaml)?)?$/.test(line)).join(", ");
  }

  clear(): void {
    for (const name of this.#names) this.call("rm", "--force", "--volumes", name);
    rmSync(this.#folder, { recursive: true });
  }
}

function checkImage(box: Box, image: string): void {
  const [user, size] = box
    .must("image", "inspect", "--format", "{{.Config.User}} {{.Size}}", image)
    .split(" ");
  box.check(`its user is ${ID}:${ID}`, user === `${ID}:${ID}`, user);
  const own = box.must("run", "--rm", "--entrypoint", "du", image, "-sb", "/opt/ferry").split(/\s/)[0];
  const megabytes = (bytes: string | undefined): string => (Number(bytes) / 1e6).toFixed(1);
  console.error(`  ${megabytes(size)} MB in all, of which Ferry and its packages are ${megabytes(own)} MB`);
  const names = box.must("run", "--rm", "--entrypoint", "ls", image, "/opt/ferry").split(/\s+/).join(" ");
  box.check(
    "nothing else of the checkout is in it",
    names === "LICENSE bin dist node_modules package.json",
    names,
  );
  const missing = box.call("run", "--rm", "--network", "none", image);
  box.check(
    "without a config it says so, and ends",
    missing.status !== 0 && /ferry\.yaml/.test(missing.text),
    missing.text,
  );
}

async function checkReadOnly(box: Box, image: string, podman: boolean): Promise<void> {
  // Podman lays writable folders over a read-only root unless it is told not to.
  const closed = podman ? ["--read-only", "--read-only-tmpfs=false"] : ["--read-only"];
  const container = box.start("ferry-readonly", image, box.config("readonly"), ...closed);
  const inside = (...words: string[]): Ended => box.call("exec", container, ...words);
  const answer = await box.ask(container, image, "hello", () => {});
  box.check("it answers", answer === "200 hello", answer);
  const status = inside("cat", "/proc/1/status").text;
  box.check(
    `process 1 is Node, as ${ID}`,
    /^Name:\s*node/m.test(status) && status.includes(`Uid:\t${ID}`),
    status,
  );
  box.check("no capability is left", /^CapEff:\s*0+$/m.test(status), status);
  for (const folder of ["/etc/ferry", "/opt/ferry", "/var/lib/ferry", "/tmp"])
    box.check(`${folder} is closed`, inside("touch", `${folder}/probe`).status !== 0);
  const version = inside("ferry", "--version");
  box.check("`ferry` is on the path", /^ferry \d/.test(version.text), version.text);
  await checkStop(box, image, container);
}

/** A request is held: it is answered, and then the process ends by itself, long before it would be killed. */
async function checkStop(box: Box, image: string, container: string): Promise<void> {
  const from = performance.now();
  const answer = await box.ask(container, image, "last", () => {
    box.must("stop", "--time", String(GRACE_S), container);
  });
  box.check("a request that is held when it is stopped is answered", answer === "200 last", answer);
  const code = box.must("inspect", "--format", "{{.State.ExitCode}}", container);
  const took = (performance.now() - from) / 1000;
  box.check(
    "it ends by itself, with 0",
    code === "0" && took < GRACE_S,
    `${code} after ${took.toFixed(1)} s`,
  );
  const logged = box.must("logs", container);
  box.check("its last word is that nothing was lost", /"msg":"stopped".*"lost":0/.test(logged), logged);
  box.check("nothing was written", box.written(container) === "", box.written(container));
}

/** The second could write where its user may, and with engine.dataDir it must. */
async function checkWritable(box: Box, image: string): Promise<void> {
  const open = box.start("ferry-open", image, box.config("open"));
  await checkStop(box, image, open);
  const config = box.config("data", ", dataDir: /var/lib/ferry ");
  const data = box.start("ferry-data", image, config, "--read-only", "--volume", "/var/lib/ferry");
  const answer = await box.ask(data, image, "kept", () => {});
  box.check("with engine.dataDir and a volume it answers too", answer === "200 kept", answer);
  const files = box.call("exec", data, "ls", "-A", "/var/lib/ferry").text.split(/\s+/);
  box.check(
    "and its files lie there, and no others",
    files.every((name) => name.startsWith("ferry.")),
    files.join(" "),
  );
}

function installed(): string {
  const found = ["docker", "podman"].find(
    (tool) => spawnSync(tool, ["info"], { stdio: "ignore" }).status === 0,
  );
  if (found === undefined)
    throw new Error("neither docker nor podman answers `info`; start one, or --with NAME");
  return found;
}

if (import.meta.main) {
  const { values, positionals } = parseArgs({
    options: { with: { type: "string" }, image: { type: "string" } },
    allowPositionals: true,
  });
  const box = new Box(values.with ?? installed());
  try {
    const image = values.image ?? "ferry:check";
    if (values.image === undefined) box.build(image, positionals);
    const podman = box.must("--version").startsWith("podman");
    checkImage(box, image);
    await checkReadOnly(box, image, podman);
    await checkWritable(box, image);
  } finally {
    box.clear();
  }
  console.error(box.failed === 0 ? "the image is what it should be" : `${box.failed} things are not so`);
  process.exitCode = box.failed === 0 ? 0 : 1;
}
