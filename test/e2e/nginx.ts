/**
 * A real nginx with one of the shipped configs: only names, ports and where it keeps temporary files are the test's.
 *
 *   await using edge = await Nginx.start("edge/nginx.conf", { "gateway-1:8080": "127.0.0.1:4711" }, pair);
 */
import assert from "node:assert/strict";
import { spawn, spawnSync, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { mkdir, readFile } from "node:fs/promises";
import { connect } from "node:net";
import { basename, join } from "node:path";
import type { Pair } from "../fixtures/certificates.ts";
import { eventually, Folder, freePort, ROOT } from "./harness.ts";

const TEMPORARY = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
/** Debian has it in /usr/sbin, which is not on everybody's path. */
const env = { ...process.env, PATH: `${process.env["PATH"]}:/usr/sbin` };

export class Nginx implements AsyncDisposable {
  readonly port: number;
  readonly #process: ChildProcess;
  readonly #folder: Folder;
  readonly #exited: Promise<unknown>;
  #said = "";

  private constructor(process: ChildProcess, folder: Folder, port: number) {
    this.#process = process;
    this.#folder = folder;
    this.port = port;
    this.#exited = once(process, "exit");
    process.stderr!.setEncoding("utf8").on("data", (text: string) => (this.#said += text));
  }

  /** `nginx -t` first: what it complains about fails the test. `file` is below deploy. */
  static async start(file: string, names: Readonly<Record<string, string>>, tls?: Pair): Promise<Nginx> {
    const folder = await Folder.make();
    const port = await freePort();
    await folder.write("nginx.conf", await configOf(file, names, port));
    await folder.write(
      "ferry-proxy.conf",
      await readFile(join(ROOT, "deploy/edge/ferry-proxy.conf"), "utf8"),
    );
    if (tls !== undefined) {
      await folder.write("tls.crt", tls.cert);
      await folder.write("tls.key", tls.key);
    }
    await mkdir(join(folder.path, "temporary"));
    const words = ["-p", folder.path, "-c", join(folder.path, "nginx.conf")];
    const tried = spawnSync("nginx", [...words, "-t"], { env, encoding: "utf8" });
    assert.equal(tried.error, undefined, "nginx is needed: apt-get install nginx");
    assert.equal(tried.status, 0, tried.stderr);
    assert.doesNotMatch(tried.stderr, /\[(warn|error|emerg)\]/);
    const child = spawn("nginx", [...words, "-g", "daemon off;"], {
      env,
      stdio: ["ignore", "ignore", "pipe"],
    });
    const nginx = new Nginx(child, folder, port);
    await eventually(() => nginx.#listens());
    return nginx;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    if (this.#process.exitCode === null && this.#process.signalCode === null) {
      this.#process.kill("SIGTERM");
      await this.#exited;
    }
    await this.#folder[Symbol.asyncDispose]();
  }

  #listens(): Promise<boolean> {
    assert.equal(this.#process.exitCode, null, `nginx ended by itself: ${this.#said}`);
    return new Promise((resolve) => {
      const socket = connect(this.port, "127.0.0.1", () => resolve(true));
      socket.on("error", () => resolve(false)).on("connect", () => socket.destroy());
    });
  }
}

async function configOf(
  file: string,
  names: Readonly<Record<string, string>>,
  port: number,
): Promise<string> {
  let text = await readFile(join(ROOT, "deploy", file), "utf8");
  for (const [name, address] of Object.entries(names)) {
    assert.ok(text.includes(name), `${basename(file)} does not name ${name}`);
    text = text.replaceAll(name, address);
  }
  const paths = TEMPORARY.map((name) => `  ${name}_temp_path temporary/${name};\n`).join("");
  return text
    .replaceAll(/^ +\w+_temp_path .*\n/gm, "")
    .replace(/^pid .*$/m, "pid nginx.pid;")
    .replace("worker_processes auto;", "worker_processes 1;")
    .replace(/listen \d+/, `listen 127.0.0.1:${port}`)
    .replace("http {\n", `http {\n${paths}`);
}
