/** `ferry top` and its stream against a real Ferry: one look, a terminal, a restart, a token, TLS, a fleet. */
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { get, type IncomingMessage } from "node:http";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { describe, test } from "node:test";
import { Authority } from "../fixtures/certificates.ts";
import { startServer } from "../engine/redis-client/servers.ts";
import { Fleet, fleetConfig } from "./fleet.ts";
import { assertError, eventually, Ferry, Folder, freePort, ROOT, runFerry, writeConfig } from "./harness.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

const BIN = join(ROOT, "bin/ferry");
const simulated = { name: "embed", maxBatchSize: 8, backend: { kind: "simulated", workers: 2, baseMs: 20 } };
const TOKEN = "a-token-that-nobody-guesses-ever";

interface Look {
  readonly now: number;
  readonly process: { readonly scope: string; readonly totals: { readonly requests: number } };
  readonly models: readonly {
    readonly name: string;
    readonly verdict: { readonly sentence: string };
    readonly recent: { readonly requestsPerSecond: number; readonly p99: number | null };
    readonly queues: readonly { readonly tier: string; readonly depth: number }[];
    readonly workers: readonly { readonly name: string; readonly busy: number; readonly batchMs: number }[];
  }[];
}

async function look(configFile: string, adminUrl: string): Promise<Look> {
  const args = ["top", "--once", "--json", "-c", configFile, "--admin", adminUrl];
  const { code, stdout, stderr } = await runFerry(args);
  assert.equal(code, 0, stderr);
  assert.equal(stdout.trimEnd().split("\n").length, 1, "one object, one line");
  return JSON.parse(stdout) as Look;
}

/** Asks one thing after another until told to stop; how many were answered. */
function keepAsking(ferry: Ferry): { stop(): Promise<number> } {
  const asking = { going: true };
  let answered = 0;
  const one = async (who: number): Promise<void> => {
    for (let n = 0; asking.going; n++) {
      const { status } = await ferry.post({ input: `${who} ${n}` });
      assert.equal(status, 200);
      answered++;
    }
  };
  const all = Promise.all([1, 2, 3, 4].map(one));
  return {
    stop: async () => {
      asking.going = false;
      await all;
      return answered;
    },
  };
}

describe("ferry top", () => {
  test("--once --json shows what goes on, as text too", async () => {
    await using ferry = await Ferry.start({ models: [simulated] });
    const asking = keepAsking(ferry);
    let seen: Look | undefined;
    await eventually(async () => {
      seen = await look(ferry.configFile, ferry.adminUrl);
      return (
        seen.models[0]!.recent.requestsPerSecond > 0 && seen.models[0]!.workers.some(({ busy }) => busy > 0)
      );
    });
    const [model] = seen!.models;
    assert.equal(model!.name, "embed");
    assert.equal(model!.workers.length, 2);
    assert.ok(model!.recent.p99! >= 19, String(model!.recent.p99));
    assert.deepEqual(
      model!.queues.map(({ tier }) => tier),
      ["enterprise", "paid", "free"],
    );
    assert.equal(seen!.process.scope, "this process");
    // No terminal: one picture, and the end.
    const { code, stdout } = await runFerry(["top", "-c", ferry.configFile, "--admin", ferry.adminUrl]);
    assert.equal(code, 0);
    assert.match(stdout, /^FERRY embed · this process · DEMO\n/);
    assert.match(stdout, /\n\d\S* req\/s {3}load /);
    assert.match(stdout, /\n\S+ {2}\[[FWID·]+\] {2}/);
    assert.doesNotMatch(stdout, /\u001b/);
    assert.ok((await asking.stop()) > 0);
  });

  test("what is wrong is one line: nobody there, no such model, a wrong token, no dashboard", async () => {
    const admin = { listen: `127.0.0.1:${await freePort()}`, token: TOKEN };
    await using folder = await Folder.make();
    const other = await writeConfig(folder, {
      models: [simulated],
      admin: { ...admin, token: "another-token-as-long-as-the-one" },
    });
    const nobody = await runFerry(["top", "-c", other]);
    assert.equal(nobody.code, 1);
    assert.match(
      nobody.stderr,
      /^ferry: top: admin listener \S+ refused the connection; is ferry serve running\?\n$/,
    );
    {
      await using ferry = await Ferry.start({ models: [simulated], admin });
      assertError(await ferry.admin("/internal/live"), 401, "UNAUTHENTICATED");
      const wrong = await runFerry(["top", "-c", other]);
      assert.equal(wrong.code, 1);
      assert.match(wrong.stderr, /refused the token; check admin\.token/);
      const right = await runFerry(["top", "-c", ferry.configFile]);
      assert.equal(right.code, 0, right.stderr);
      assert.match(right.stdout, /\nQuiet\. No request yet; 2 workers are ready\.\n/);
      const unknown = await runFerry(["top", "-c", ferry.configFile, "--model", "embd"]);
      assert.equal(unknown.code, 2);
      assert.match(unknown.stderr, /--model embd is not there; did you mean embed\?/);
    }
    await using ferry = await Ferry.start({ models: [simulated], telemetry: { dashboard: false } });
    const off = await runFerry(["top", "-c", ferry.configFile, "--admin", ferry.adminUrl]);
    assert.equal(off.code, 1);
    assert.match(off.stderr, /has no \/internal\/live; set telemetry\.dashboard: true/);
  });

  test("--json goes on over a restart of the server", async () => {
    await using folder = await Folder.make();
    const config = { models: [simulated], admin: { listen: `127.0.0.1:${await freePort()}` } };
    const first = await Ferry.start(config, folder);
    const top = spawn(BIN, ["top", "--json", "-c", first.configFile], { stdio: ["ignore", "pipe", "pipe"] });
    try {
      const looks: Look[] = [];
      let said = "";
      createInterface({ input: top.stdout }).on("line", (line) => looks.push(JSON.parse(line) as Look));
      top.stderr.setEncoding("utf8").on("data", (text: string) => (said += text));
      await eventually(() => looks.length >= 3);
      await first.stop();
      await first[Symbol.asyncDispose]();
      await eventually(() => /; trying again\n/.test(said));
      await using second = await Ferry.start(config, folder);
      await second.infer("again");
      await eventually(() => looks.at(-1)!.process.totals.requests === 1);
    } finally {
      top.kill("SIGKILL");
      if (top.exitCode === null && top.signalCode === null) await once(top, "exit");
    }
  });

  test("through TLS, with the certificate of the config", async () => {
    using authority = new Authority();
    const { certFile, keyFile } = authority.issue();
    const admin = { listen: "127.0.0.1:0", tls: true, token: TOKEN };
    await using ferry = await Ferry.start({ tls: { certFile, keyFile }, admin, models: [simulated] });
    assert.match(ferry.adminUrl, /^https:/);
    assert.equal((await look(ferry.configFile, ferry.adminUrl)).models[0]!.name, "embed");
  });
});

/** Runs a command in a terminal of its own; what it wrote, and how it ended. */
async function inTerminal(args: readonly string[], script: string) {
  const child = spawn("python3", ["-c", PTY, script, BIN, ...args], { stdio: ["ignore", "pipe", "inherit"] });
  let out = "";
  child.stdout.setEncoding("utf8").on("data", (text: string) => (out += text));
  const [code] = (await once(child, "close")) as [number | null];
  assert.equal(code, 0, "python3 could not run it");
  return JSON.parse(out) as { code: number; text: string };
}

/** The script is "wait for this text", "key", "signal" or "size", one a line; each waits at most a minute. */
const PTY = `
import fcntl, json, os, pty, select, signal, struct, sys, termios, time
steps = json.loads(sys.argv[1])
pid, fd = pty.fork()
if pid == 0: os.execvp(sys.argv[2], sys.argv[2:])
def size(rows, columns): fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
size(24, 100)
text = b""
def read(timeout):
    global text
    if not select.select([fd], [], [], timeout)[0]: return True
    try: chunk = os.read(fd, 65536)
    except OSError: return False
    text += chunk
    return chunk != b""
seen = 0
for kind, value in steps:
    if kind == "wait":
        deadline = time.time() + 60
        while value.encode() not in text[seen:] and time.time() < deadline and read(0.1): pass
        seen = len(text)
    elif kind == "key": os.write(fd, value.encode())
    elif kind == "size": size(*value)
    else: os.kill(pid, getattr(signal, value))
deadline = time.time() + 60
while time.time() < deadline and read(0.1): pass
if time.time() >= deadline: os.kill(pid, signal.SIGKILL)
_, status = os.waitpid(pid, 0)
print(json.dumps({"code": os.waitstatus_to_exitcode(status), "text": text.decode("utf8", "replace")}))
`;

describe("in a terminal", () => {
  const opened = /\u001b\[\?1049h\u001b\[\?25l/;
  const restored = /\u001b\[\?25h\u001b\[\?1049l$/;

  test("it draws in place, follows its keys and its size, and gives the terminal back", async () => {
    const other = { ...simulated, name: "rerank" };
    await using ferry = await Ferry.start({ models: [simulated, other] });
    const steps = [
      ["wait", "FERRY"],
      ["key", "m"],
      ["wait", "rerank"],
      ["size", [12, 41]],
      ["wait", "FERRY"],
      ["key", "p"],
      ["wait", "PAUSED"],
      ["key", "q"],
    ];
    const args = ["top", "-c", ferry.configFile, "--admin", ferry.adminUrl];
    const { code, text } = await inTerminal(args, JSON.stringify(steps));
    assert.equal(code, 0, text);
    assert.match(text, opened);
    assert.match(text, restored);
    const pictures = text.split("\u001b[?2026h").slice(1);
    assert.ok(pictures.length >= 4, `${pictures.length} pictures`);
    const last = pictures
      .at(-1)!
      .replace(/\u001b\[[?\d;]*[A-Za-z]/g, "")
      .split(/\r+\n/);
    assert.ok(last.length <= 12, last.join("\n"));
    for (const line of last) assert.ok(Array.from(line).length <= 41, line);
  });

  test("a signal gives the terminal back too", async () => {
    await using ferry = await Ferry.start({ models: [simulated] });
    for (const [signal, expected] of [
      ["SIGTERM", 143],
      ["SIGINT", 130],
    ] as const) {
      const steps = [
        ["wait", "FERRY"],
        ["signal", signal],
      ];
      const args = ["top", "-c", ferry.configFile, "--admin", ferry.adminUrl];
      const { code, text } = await inTerminal(args, JSON.stringify(steps));
      assert.equal(code, expected);
      assert.match(text, restored);
    }
  });
});

interface Greeting {
  readonly role: string;
  readonly frame: {
    readonly process: { readonly scope: string };
    readonly models: readonly { readonly batches: unknown[][]; readonly workers: unknown[] }[];
  };
}

describe("the stream", () => {
  const watch = async (url: string): Promise<IncomingMessage> => {
    const [response] = (await once(get(`${url}/internal/live`), "response")) as [IncomingMessage];
    return response;
  };

  test("no more than 20 viewers, and none holds up the end", async () => {
    await using ferry = await Ferry.start({ models: [simulated] });
    const [one, ...others] = await Promise.all(Array.from({ length: 20 }, () => watch(ferry.adminUrl)));
    assert.equal(one!.statusCode, 200);
    const refused = assertError(await ferry.admin("/internal/live"), 503, "SERVICE_OVERLOADED");
    assert.match(refused.message!, /^20 viewers watch already; close one/);
    one!.destroy();
    await eventually(async () => {
      const again = await watch(ferry.adminUrl);
      again.destroy();
      return again.statusCode === 200;
    });
    // Cut off is an error to a client of HTTP; here it is what is waited for.
    const ended = others.map(
      (each) =>
        new Promise<void>((resolve) =>
          each
            .resume()
            .on("error", () => {})
            .once("close", resolve),
        ),
    );
    assert.equal((await ferry.stop()).code, 0);
    await Promise.all(ended);
  });

  test("a gateway shows the batches that others ran for it", async () => {
    await using redis = await startServer();
    await using worker = await StubWorker.listen();
    const config = fleetConfig({ url: `redis://127.0.0.1:${redis.port}` }, [stubModel([worker])]);
    await using fleet = await Fleet.start({ gateways: 1, batchers: 1 }, config);
    const [gateway] = fleet.gateways;
    for (let n = 0; n < 5; n++) assert.equal((await gateway!.post({ input: `x${n}` })).status, 200);
    const greet = async (): Promise<Greeting> => {
      const response = await watch(gateway!.adminUrl);
      let text = "";
      response.setEncoding("utf8").on("data", (chunk: string) => (text += chunk));
      await eventually(() => text.includes("event: frame"));
      response.destroy();
      return JSON.parse(/event: hello\ndata: (.*)\n/.exec(text)![1]!) as Greeting;
    };
    let hello = await greet();
    await eventually(async () => (hello = await greet()).frame.models[0]!.batches.length >= 5);
    assert.equal(hello.role, "gateway");
    assert.match(hello.frame.process.scope, /^gateway \S+, one of 2 processes$/);
    assert.equal(hello.frame.models[0]!.workers.length, 1);
    assert.equal(hello.frame.models[0]!.batches.length, 5);
    for (const row of hello.frame.models[0]!.batches) {
      const [, , startedAt, endedAt, size] = row as [string, string, number, number, number];
      assert.ok(endedAt >= startedAt && size === 1, JSON.stringify(row));
    }
  });
});
