/**
 * A real Prometheus in a folder of its own, with the rules and the scrape config of deploy/prometheus: only the
 * target, the token and how often it asks are the test's.
 */
import assert from "node:assert/strict";
import { spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { cp, readFile } from "node:fs/promises";
import { join } from "node:path";
import { request } from "undici";
import { eventually, Folder, freePort, ROOT } from "./harness.ts";

interface Series {
  readonly metric: Readonly<Record<string, string>>;
  readonly value: readonly [number, string];
}

export interface Target {
  readonly health: string;
  readonly lastError: string;
}

export class Prometheus implements AsyncDisposable {
  readonly #process: ChildProcess;
  readonly #folder: Folder;
  readonly #exited: Promise<unknown>;
  readonly #url: string;
  #stderr = "";

  private constructor(process: ChildProcess, folder: Folder, url: string) {
    this.#process = process;
    this.#folder = folder;
    this.#url = url;
    this.#exited = once(process, "exit");
    process.stderr!.setEncoding("utf8").on("data", (text: string) => (this.#stderr += text));
  }

  /** Scrapes the admin listener at `target` each second. */
  static async start(target: string, token: string): Promise<Prometheus> {
    const folder = await Folder.make();
    await cp(join(ROOT, "deploy/prometheus"), folder.path, { recursive: true });
    await folder.write("ferry-admin-token", token);
    const shipped = await readFile(join(folder.path, "prometheus.yaml"), "utf8");
    const config = shipped.replace("127.0.0.1:8081", new URL(target).host).replaceAll(": 15s", ": 1s");
    assert.notEqual(config, shipped);
    await folder.write("prometheus.yaml", config);
    const address = `127.0.0.1:${await freePort()}`;
    const words = [
      "--config.file=prometheus.yaml",
      "--storage.tsdb.path=data",
      "--enable-feature=exemplar-storage",
      `--web.listen-address=${address}`,
      "--log.level=warn",
    ];
    const child = spawn("prometheus", words, { cwd: folder.path, stdio: ["ignore", "ignore", "pipe"] });
    child.on("error", () => {}); // Not installed: told below, when it does not answer.
    const prometheus = new Prometheus(child, folder, `http://${address}`);
    try {
      await eventually(() => prometheus.#ready());
    } catch (error) {
      await prometheus[Symbol.asyncDispose]();
      const hint = "prometheus does not start (apt-get install prometheus)";
      throw new Error(`${hint}: ${prometheus.#stderr}`, { cause: error });
    }
    return prometheus;
  }

  /** The values of an expression now. */
  async query(expr: string): Promise<Series[]> {
    const answer = await this.#get(`/api/v1/query?query=${encodeURIComponent(expr)}`);
    return (answer as { result: Series[] }).result;
  }

  /** Of an expression that has one value. */
  async value(expr: string): Promise<number | undefined> {
    const result = await this.query(expr);
    return result.length === 1 ? Number(result[0]!.value[1]) : undefined;
  }

  /** Asks until an expression has that one value. */
  async reaches(expr: string, value: number): Promise<void> {
    let last: number | undefined;
    await eventually(async () => (last = await this.value(expr)) === value).catch((error: unknown) => {
      throw new Error(`${expr} is ${last}, not ${value}`, { cause: error });
    });
  }

  /** The trace ids that it kept beside the values of a metric. */
  async exemplars(metric: string): Promise<string[]> {
    const now = Date.now() / 1000;
    const path = `/api/v1/query_exemplars?query=${metric}&start=${now - 600}&end=${now + 600}`;
    const series = (await this.#get(path)) as { exemplars: { labels: { trace_id: string } }[] }[];
    return series.flatMap(({ exemplars }) => exemplars.map(({ labels }) => labels.trace_id));
  }

  async targets(): Promise<readonly Target[]> {
    return ((await this.#get("/api/v1/targets")) as { activeTargets: Target[] }).activeTargets;
  }

  /** Every rule with its health. */
  async rules(): Promise<readonly { name: string; health: string; lastError?: string }[]> {
    const { groups } = (await this.#get("/api/v1/rules")) as {
      groups: { rules: { name: string; health: string }[] }[];
    };
    return groups.flatMap((group) => group.rules);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const { exitCode, signalCode, pid } = this.#process;
    if (pid !== undefined && exitCode === null && signalCode === null) {
      this.#process.kill("SIGKILL");
      await this.#exited;
    }
    await this.#folder[Symbol.asyncDispose]();
  }

  async #ready(): Promise<boolean> {
    assert.equal(this.#process.exitCode, null, this.#stderr);
    assert.notEqual(this.#process.pid, undefined, "no such program");
    try {
      const { statusCode, body } = await request(`${this.#url}/-/ready`);
      await body.dump();
      return statusCode === 200;
    } catch {
      return false;
    }
  }

  async #get(path: string): Promise<unknown> {
    const { statusCode, body } = await request(this.#url + path);
    const text = await body.text();
    assert.equal(statusCode, 200, text);
    return (JSON.parse(text) as { data: unknown }).data;
  }
}
