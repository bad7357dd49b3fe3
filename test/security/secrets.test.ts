/**
 * Canaries: a secret of its own in every place where a secret or an input can be, through a Ferry that logs
 * everything, and then a look at all that came out of it. Each canary says where it was put, so that a leak names
 * its source.
 */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { type Answer, eventually, Ferry, Folder, freePort, runFerry, writeConfig } from "../e2e/harness.ts";
import { postText, RawClient } from "../e2e/raw-client.ts";
import { stubModel, StubWorker } from "../e2e/stub-worker.ts";

const CANARY = /CANARY-[a-z-]+/;
const found = (text: string): string[] => [...new Set(text.match(/CANARY-[a-z-]+/g))];
const canary = (where: string): string => `CANARY-${where}`;
const TOKEN = canary("admin-token");

/** Throws with its input in the message, dies with it, or answers. */
const MODULE = `
export default async function (inputs) {
  for (const input of inputs) {
    if (input.startsWith("throw")) throw new RangeError("cannot do " + input, { cause: new Error(input) });
    if (input.startsWith("nan")) return [{ [input]: NaN }];
    if (!input.startsWith("die")) continue;
    queueMicrotask(() => { throw new TypeError("died of " + input); });
    await new Promise(() => {});
  }
  return inputs;
}
`;
const PYTHON = `
def batch(inputs):
    for text in inputs:
        if text.startswith("throw"):
            raise ValueError("cannot do " + text)
    return inputs
`;

let folder: Folder;
let stub: StubWorker;
let ferry: Ferry;
let key: string;
/** Every body that a client or an operator got, but for those that must hold what was put in. */
const bodies: string[] = [];

before(async () => {
  folder = await Folder.make();
  let busy = 0;
  stub = await StubWorker.listen((call) => {
    const text = String(call.inputs[0]);
    const words = `cannot read ${call.body}`;
    if (text.startsWith("fail")) call.reply(500, words);
    else if (text.startsWith("busy") && busy++ < 2) call.reply(503, words, { "retry-after": "0" });
    else if (text.startsWith("junk")) call.reply(200, `<html>${words}</html>`);
    else call.echo();
  });
  const quick = { retry: { max: 1, baseMs: 1, maxMs: 1 }, cache: { scope: "off" }, collapse: false };
  const module = await folder.write("model.ts", MODULE);
  const python = await folder.write("model.py", PYTHON);
  const config = {
    admin: { listen: "127.0.0.1:0", token: TOKEN },
    models: [
      stubModel([stub], quick),
      { ...quick, name: "module", backend: { kind: "module", function: module } },
      { ...quick, name: "python", backend: { kind: "python", function: `${python}:batch` } },
    ],
    auth: {
      mode: "required",
      keysFile: "./keys.json",
      secret: canary("auth-secret-of-32-characters-or-more"),
    },
    telemetry: { logLevel: "debug" },
  };
  const file = await writeConfig(folder, config);
  const made = await runFerry(["keys", "create", "--user", "u1", "--tier", "enterprise", "-c", file]);
  key = /fy_live_\w+/.exec(made.stdout)?.[0] ?? "";
  assert.notEqual(key, "", made.stderr);
  ferry = await Ferry.start(config, folder);
});
after(async () => {
  await ferry?.[Symbol.asyncDispose]();
  await stub?.[Symbol.asyncDispose]();
  await folder?.[Symbol.asyncDispose]();
});

const keep = (answer: Answer): Answer => {
  bodies.push(answer.text + JSON.stringify(answer.headers));
  return answer;
};
const ask = (model: string, input: string, headers = {}): Promise<Answer> =>
  ferry.post({ model, input }, { authorization: `Bearer ${key}`, ...headers });
const admin = async (path: string): Promise<Answer> =>
  keep(await ferry.admin(path, "GET", { authorization: `Bearer ${TOKEN}` }));

describe("30 canary secrets: none in logs, error bodies or the operators' pages", () => {
  test("wrong credentials of every kind", async () => {
    const wrong = [
      { authorization: `Bearer ${canary("bearer")}` },
      { authorization: `Basic ${canary("basic")}` },
      { authorization: `Bearer fy_live_${canary("api-key-in-bearer")}` },
      { authorization: `Bearer e30.${canary("jwt")}.e30` },
      { "x-api-key": canary("x-api-key") },
    ];
    for (const headers of wrong) {
      const answer = await ferry.post({ input: canary("strangers-input") }, headers);
      assert.equal(keep(answer).status, 401);
    }
    const foreign = await ferry.admin("/internal/health", "GET", {
      authorization: `Bearer ${canary("guess")}`,
    });
    assert.equal(keep(foreign).status, 401);
  });

  test("inputs, outputs, parameters and Idempotency-Keys of requests that succeed", async () => {
    const headers = { "idempotency-key": canary("idempotency-key"), authorization: `Bearer ${key}` };
    const body = { model: "stub", input: canary("input"), parameters: { p: canary("parameters") } };
    assert.equal((await ferry.post(body, headers)).status, 200);
    keep(await ferry.post({ ...body, input: canary("conflicting-input") }, headers));
    for (const model of ["module", "python"]) {
      const answer = await ask(model, canary(`input-of-${model}`));
      assert.equal(answer.status, 200, answer.text);
      await admin(`/internal/requests/${answer.json.task_id}`);
    }
  });

  test("bodies that are refused at the door", async () => {
    for (const body of [
      `{"input":"${canary("broken-json")}`,
      `{"input":"a","client_id":"\\u0007${canary("id")}"}`,
    ]) {
      assert.equal(keep(await ferry.post(body, { authorization: `Bearer ${key}` })).status, 400);
    }
  });

  test("a worker that quotes the input when it is busy", async () => {
    const answer = await ask("stub", `busy ${canary("input-that-met-a-busy-worker")}`);
    assert.equal(answer.status, 200, answer.text);
  });

  for (const kind of ["fail", "junk"]) {
    test(`a worker that quotes the input when it fails (${kind})`, async () => {
      const answer = keep(await ask("stub", `${kind} ${canary(`input-that-made-it-${kind}`)}`));
      assert.equal(answer.status, 502, answer.text);
      await admin(`/internal/requests/${answer.json.request_id}`);
      await admin("/internal/workers");
    });
  }

  test("functions that throw their input: the caller is told, nobody else", async () => {
    for (const model of ["module", "python"]) {
      const answer = await ask(model, `throw ${canary(`input-that-${model}-threw`)}`);
      assert.equal(answer.status, 422, answer.text);
      assert.match(answer.json.message!, CANARY, "their own words about their own input");
      await admin(`/internal/requests/${answer.json.request_id}`);
    }
    keep(await ask("module", `nan ${canary("key-of-a-nan")}`));
  });

  test("a thread that dies of its input; the operator finds the words in the dead letter", async () => {
    const answer = keep(await ask("module", `die ${canary("input-that-killed")}`));
    assert.equal(answer.status, 502, answer.text);
    await admin(`/internal/requests/${answer.json.request_id}`);
    const letter = await ferry.admin(`/internal/dead-letters/${answer.json.request_id}`, "GET", {
      authorization: `Bearer ${TOKEN}`,
    });
    assert.match(letter.text, /died of TypeError: died of die CANARY-input-that-killed/);
  });

  test("pages that everybody may read", async () => {
    for (const path of ["/openapi.json", "/healthz", "/readyz", "/nothing-here"]) keep(await ferry.get(path));
    for (const path of ["/internal/health", "/internal/workers", "/metrics", "/healthz"]) await admin(path);
  });

  test("29 CR, LF and ESC in names and headers: one JSON line each, no header split", async () => {
    const odd = String.raw`a\u001b[31m\r\nb: ${canary("odd-name")}`;
    const answer = await ferry.post(`{"input":1,"model":"${odd}"}`, { authorization: `Bearer ${key}` });
    assert.equal(answer.status, 400);
    for (const target of ["/v1/result/a%0d%0aSet-Cookie:%20b", "/%1b[31m", "/v1/result/\u00ff"]) {
      await using client = await RawClient.connect(ferry.url);
      client.send(`GET ${target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ${key}\r\n\r\n`);
      const raw = await client.answer();
      assert.ok([400, 404].includes(raw.status), raw.text);
      assert.equal(raw.headers["set-cookie"], undefined);
    }
    await using client = await RawClient.connect(ferry.url);
    client.send(postText('{"input":1}', "Idempotency-Key: a\u001b]0;b\u0007"));
    assert.equal((await client.answer()).status, 400);
  });

  test("afterwards nothing of it is found anywhere", async () => {
    await eventually(() => ferry.lines.some((line) => line.msg === "request answered"));
    const log = ferry.stderr();
    assert.deepEqual(found(log), [], "in the log");
    assert.ok(!log.includes(key) && !log.includes("fy_live_"), "no key in the log");
    assert.equal(ferry.stdout, "");
    assert.deepEqual(found(bodies.join("\n")), [], "in a body");
    assert.ok(!bodies.some((body) => body.includes(key)));
    const broken = ferry.lines.filter(
      (line) => typeof line.msg !== "string" || typeof line.level !== "string",
    );
    assert.deepEqual(broken, [], "every line is JSON with a level and a message");
    const messages = new Set(ferry.lines.map((line) => line.msg));
    for (const msg of ["dead letter", "task retried", "worker printed", "batch settled", "request answered"])
      assert.ok(messages.has(msg), `the log has "${msg}", so it was looked at`);
  });
});

describe("30 canary secrets in the config", () => {
  const start = async (config: Record<string, unknown>): Promise<string> => {
    await using own = await Folder.make();
    const { code, stdout, stderr } = await runFerry(["serve", "-c", await writeConfig(own, config)]);
    assert.equal(code, 1, stderr);
    return stdout + stderr;
  };
  const simulated = { name: "m", backend: { kind: "simulated" } };

  test("a worker's URL with a password is a mistake that does not show it", async () => {
    const workers = [`http://user:${canary("worker-password")}@127.0.0.1:9/infer`];
    const said = await start({
      models: [{ name: "m", backend: { kind: "http", protocol: "batch", workers } }],
    });
    assert.match(said, /models\[0\]\.backend\.workers\[0\]/);
    assert.doesNotMatch(said, CANARY);
  });

  test("a query in a worker's URL is not part of its name", async () => {
    await using worker = await StubWorker.listen();
    const workers = [`${worker.url}?key=${canary("worker-query")}`];
    const backend = { kind: "http", protocol: "batch", workers };
    await using own = await Ferry.start({
      models: [{ name: "m", backend }],
      telemetry: { logLevel: "debug" },
    });
    await own.infer("a");
    await worker.close();
    await own.post({ input: "b" }, { prefer: "wait=0" });
    const seen = (await own.admin("/internal/workers")).text + own.stderr();
    assert.doesNotMatch(seen, CANARY);
  });

  test("a Redis that cannot be reached, or refuses the password, is named without it", async () => {
    const url = `redis://user:${canary("redis-password")}@127.0.0.1:${await freePort()}`;
    const said = await start({ engine: { kind: "redis", url }, models: [simulated] });
    assert.match(said, /not reachable/);
    assert.doesNotMatch(said, CANARY);
  });

  test("secrets of the wrong kind or length", async () => {
    const said = await start({
      admin: { token: `${canary("token-with")} a blank` },
      auth: { mode: "required", keysFile: "k", secret: canary("short") },
      engine: { kind: "redis", nodes: ["a:1"], username: "u", password: `${canary("password")} \u0001` },
      models: [simulated],
    });
    assert.doesNotMatch(said, CANARY);
  });
});
