/** `ferry serve --processes`: several gateway processes behind one port are one Ferry to clients and operators. */
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { after, before, beforeEach, describe, test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { startServer } from "../engine/redis-client/servers.ts";
import { fleetConfig, Part, patient } from "./fleet.ts";
import { childrenOf, counter, type Door, engineConfig, KINDS, Several } from "./gateways.ts";
import { assertError, eventually, Folder, runFerry, writeConfig } from "./harness.ts";
import { echo, Gate, stubModel, StubWorker } from "./stub-worker.ts";

/** A client from elsewhere, with a connection for each request; it says which answers were not its own. */
const PYTHON_CLIENT = `
import concurrent.futures, http.client, json, sys, urllib.request
base = sys.argv[1]
host = base.split("//")[1]
def one(n):
    text = f"python {n} \\u00fc \\u6f22 \\U0001f600"
    body = json.dumps({"model": "stub", "input": text}, ensure_ascii=n % 2 == 0).encode()
    headers = {"content-type": "application/json"}
    if n % 2 == 0:
        request = urllib.request.Request(base + "/v1/inference", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer: got = json.load(answer)
    else:
        line = http.client.HTTPConnection(host, timeout=60)
        line.request("POST", "/v1/inference", body, {**headers, "prefer": "respond-async"})
        answer = line.getresponse(); accepted = json.load(answer); line.close()
        line = http.client.HTTPConnection(host, timeout=60)
        line.request("GET", "/v1/result/" + accepted["task_id"] + "?wait=30")
        got = json.load(line.getresponse()); line.close()
    return got.get("output") == {"of": text}
with concurrent.futures.ThreadPoolExecutor(8) as pool: print(sum(pool.map(one, range(40))))
`;

for (const kind of KINDS) {
  describe(`several gateways, ${kind}`, () => {
    const stack = new AsyncDisposableStack();
    let folder: Folder;
    let stub: StubWorker;
    let ferry: Several;
    let [a, b]: Door[] = [];
    let admin: string[];

    before(async () => {
      folder = stack.use(await Folder.make());
      stub = stack.use(await StubWorker.listen());
      const model = stubModel([stub], { timeouts: patient, retry: { max: 0 }, maxBatchSize: 8 });
      const more = { admission: { mode: "off" }, limits: { maxBodyBytes: 4_000_000 } };
      const config = await engineConfig(kind, stack, folder, [model], more);
      const file = await writeConfig(folder, config);
      ferry = stack.use(await Several.start(config, 2));
      admin = ["-c", file, "--admin", ferry.part.adminUrl];
      [a, b] = ferry.doors();
    });
    after(() => stack.disposeAsync());
    beforeEach(() => {
      stub.behave = echo;
      stub.calls.length = 0;
    });

    test("what one accepted is polled, awaited, cancelled and forgotten at the other", async () => {
      const gate = new Gate();
      stub.behave = gate.hold;
      const running = await a!.accept({ input: "running" });
      await stub.call(1);
      const queued = await a!.accept({ input: "queued" });
      assert.equal((await b!.get(`/v1/result/${running}`)).json.status, "PENDING");
      assertError(await b!.delete(`/v1/result/${running}`), 409, "NOT_CANCELLABLE");
      assert.equal((await b!.delete(`/v1/result/${queued}`)).status, 200);
      assert.equal((await a!.get(`/v1/result/${queued}`)).json.error, "CANCELLED");
      const waits = [a!, b!, b!].map((door) => door.result(running));
      gate.open();
      for (const { output } of await Promise.all(waits)) assert.deepEqual(output, { of: "running" });
      assert.equal((await b!.delete(`/v1/result/${running}`)).status, 204);
      for (const door of [a!, b!]) assert.equal((await door.get(`/v1/result/${running}`)).status, 404);
      assert.deepEqual(stub.inputs, ["running"]);
    });

    test("identical requests at different gateways run once, in flight, by key and from the cache", async () => {
      const gate = new Gate();
      stub.behave = gate.hold;
      const same = [a!, b!, b!, a!].map((door) => door.post({ input: "the same" }));
      const key = { "idempotency-key": "one key" };
      const keyed = [a!, b!].map((door) => door.post({ input: "with a key" }, key));
      await eventually(() => stub.inputs.length >= 1);
      // Time for the others to arrive; the count below does not depend on it.
      await pause(100);
      gate.open();
      for (const { status, text, json } of await Promise.all(same)) {
        assert.equal(status, 200, text);
        assert.deepEqual(json.output, { of: "the same" });
      }
      const answers = await Promise.all(keyed);
      assert.equal(new Set(answers.map(({ json }) => json.task_id)).size, 1);
      assert.equal((await b!.post({ input: "with a key" }, key)).json.task_id, answers[0]!.json.task_id);
      assert.equal((await b!.post({ input: "another body" }, key)).status, 422);
      const cached = await b!.post({ input: "the same" });
      assert.equal(cached.json.metadata!["cached"], true);
      assert.deepEqual(new Set(stub.inputs), new Set(["the same", "with a key"]));
      assert.equal(stub.inputs.length, 2);
    });

    test("who hangs up while queued is dropped, unless somebody at another gateway waits for it too", async () => {
      const gate = new Gate();
      stub.behave = gate.hold;
      const held = a!.post({ input: "holds the worker" });
      await stub.call(1);
      const lines = Array.from({ length: 2 }, () => new AbortController());
      const gone = lines.map(({ signal }, at) =>
        assert.rejects(a!.post({ input: `leaves ${at}` }, {}, "/v1/inference", signal)),
      );
      const stays = b!.post({ input: "leaves 1" });
      const before = (await ferry.part.health()).totals.dropped;
      await eventually(async () => (await ferry.part.health()).queue_depth === 2);
      await pause(200);
      for (const line of lines) line.abort();
      await Promise.all(gone);
      await eventually(async () => (await ferry.part.health()).totals.dropped === before + 1);
      gate.open();
      assert.deepEqual((await stays).json.output, { of: "leaves 1" });
      assert.equal((await held).status, 200);
      assert.deepEqual(stub.inputs, ["holds the worker", "leaves 1"]);
    });

    test("bodies of 2 MB, of any characters, in any notation: each answer is its own, to the character", async () => {
      const long = "x".repeat(1_000_000);
      const texts = [
        JSON.stringify(`${long}ü`),
        JSON.stringify(`漢${long}`),
        JSON.stringify(`é${long.slice(0, 500_000)}\u{1F600}`),
        `"${"ÿ".repeat(900_000)}"`,
        `{"n":9007199254740993,"m":1.0,"t":"\u2028"}`,
        `[${Array.from({ length: 100_000 }, (_, at) => at).join()}]`,
      ];
      stub.behave = (call) => call.reply(200, `{"outputs":${/"inputs":(\[.*\])/s.exec(call.body)![1]}}`);
      const asked = texts.map(async (text, at) => {
        const body = Buffer.from(`{"input":${text},"parameters":{"n":${at}}}`);
        const { status, text: answer } = await (at % 2 === 0 ? a! : b!).post(body);
        assert.equal(status, 200, answer.slice(0, 200));
        assert.ok(answer.includes(`"output":${text},`), `the answer to text ${at} is another`);
      });
      await Promise.all(asked);
      const lone = await b!.post(String.raw`{"input":"\ud800"}`);
      assertError(lone, 400, "INVALID_REQUEST");
    });

    test("clients of Python that open a connection for each request get their own answers", async () => {
      const python = spawn("python3", ["-c", PYTHON_CLIENT, ferry.part.url], {
        stdio: ["ignore", "pipe", "inherit"],
      });
      let told = "";
      python.stdout.setEncoding("utf8").on("data", (text: string) => (told += text));
      await once(python, "close");
      assert.equal(told.trim(), "40");
    });

    test("counters and the list of requests are what clients saw, at whichever gateway", async () => {
      const names = ["ferry_requests_total", "ferry_arrivals_total", "ferry_batches_total"];
      const codes = [200, 202, 400, 404, 502];
      const counts = async (): Promise<Record<string, number>> => {
        const { part } = ferry;
        const totals = await Promise.all(names.map((name) => counter(part, name)));
        const byCode = await Promise.all(
          codes.map((code) => counter(part, "ferry_requests_total", `code="${code}"`)),
        );
        return Object.fromEntries(
          [...names, ...codes].map((name, at) => [name, [...totals, ...byCode][at]!]),
        );
      };
      // What gateways have counted is there a moment later.
      let start = await counts();
      await eventually(async () => {
        await pause(100);
        const before = start;
        start = await counts();
        return JSON.stringify(before) === JSON.stringify(start);
      });
      stub.behave = (call) => (call.inputs.includes("fails") ? call.reply(500, "{}") : call.echo());
      const seen = new Map<number, number>();
      const ids: string[] = [];
      const see = (status: number): void => void seen.set(status, (seen.get(status) ?? 0) + 1);
      for (let n = 0; n < 20; n++) {
        const door = n % 2 === 0 ? a! : b!;
        const [held, polled] = await Promise.all([
          door.post({ input: `counted ${n}` }),
          door.post({ input: `polled ${n}` }, { prefer: "respond-async" }),
        ]);
        ids.push(held.json.task_id!, polled.json.task_id!);
        see(held.status);
        see(polled.status);
        // Seldom at the other one: on Redis its outcome is looked up there once a second.
        see((await (n % 10 === 9 ? a! : door).get(`/v1/result/${polled.json.task_id}?wait=30`)).status);
        see((await door.post("{")).status);
        see((await door.get(`/v1/result/unknown-${n}`)).status);
      }
      for (const door of [a!, b!])
        see((await door.post({ input: "fails", parameters: { at: door.pid } })).status);
      assert.deepEqual(Object.fromEntries(seen), { 200: 40, 202: 20, 400: 20, 404: 20, 502: 2 });
      let grown: Record<string, number> = {};
      const right = {
        ferry_requests_total: 102,
        ferry_arrivals_total: 42,
        ferry_batches_total: stub.calls.length,
      };
      await eventually(async () => {
        const now = await counts();
        grown = Object.fromEntries(Object.entries(now).map(([name, count]) => [name, count - start[name]!]));
        return grown["ferry_requests_total"]! >= 102;
      });
      assert.partialDeepStrictEqual(grown, { ...right, ...Object.fromEntries(seen) });
      assert.equal(await counter(ferry.part, "ferry_lost_total"), 0);

      const { requests } = JSON.parse((await ferry.part.admin("/internal/requests?limit=200")).text) as {
        requests: { id?: string; task_id?: string }[];
      };
      const listed = JSON.stringify(requests);
      for (const id of ids) assert.ok(listed.includes(id), `${id} is not listed`);
      for (const id of ids.slice(0, 2)) {
        const story = await ferry.part.admin(`/internal/requests/${id}`);
        assert.equal(story.status, 200, story.text);
        assert.match(story.text, new RegExp(`"batch`));
      }
    });

    test("dead letters and workers at the one admin listener, by the commands", async () => {
      stub.behave = (call) => call.reply(500, "{}");
      const id = (await b!.post({ input: "dead" })).json.request_id!;
      const ferryCommand = async (...words: readonly string[]): Promise<string> => {
        const { code, stdout, stderr } = await runFerry([...words, ...admin]);
        assert.equal(code, 0, stderr);
        return stdout;
      };
      assert.match(await ferryCommand("dead", "list"), new RegExp(id));
      assert.match(await ferryCommand("dead", "show", id), /dead/);
      stub.behave = echo;
      await ferryCommand("dead", "replay", id);
      assert.deepEqual((await a!.result(id)).output, { of: "dead" });

      const [worker] = await ferry.part.workers();
      await using other = await StubWorker.listen();
      await ferryCommand("workers", "add", other.url);
      await ferryCommand("workers", "drain", worker!.name);
      // On Redis a gateway hears of the new worker with the next beat, and refuses until then.
      for (const door of [a!, b!])
        await eventually(async () => (await door.post({ input: `other ${door.pid}` })).status === 200);
      assert.equal(other.inputs.length, 2);
      await ferryCommand("workers", "resume", worker!.name);
      const { host } = new URL(other.url);
      await ferryCommand("workers", "remove", host);
      await eventually(async () => (await ferry.part.workers()).length === 1);
      stub.calls.length = 0;
      for (const door of [a!, b!])
        await eventually(async () => (await door.post({ input: `back ${door.pid}` })).status === 200);
      assert.equal(stub.inputs.length, 2);
      const { code, stdout } = await runFerry(["top", "--once", "--json", ...admin]);
      assert.equal(code, 0);
      assert.match(stdout, /"workers"/);
    });
  });
}

describe("how many processes", () => {
  const model = { name: "demo", timeouts: patient, backend: { kind: "simulated", workers: 1, baseMs: 1 } };

  test("--processes 1 is one process, and so is a batcher whatever was asked for", async () => {
    await using redis = await startServer();
    for (const [role, count, config] of [
      ["all", "1", { models: [model] }],
      ["batcher", "3", fleetConfig({ url: redis.url }, [model])],
    ] as const) {
      await using part = await Part.start(role, config, ["--processes", count]);
      const ready = await part.line(({ msg }) => msg === "ready");
      assert.equal(ready["processes"], undefined);
      assert.deepEqual(childrenOf(part.pid), []);
    }
  });

  test("--role gateway: gateways and a core without workers, beside a batcher", async () => {
    await using redis = await startServer();
    await using stub = await StubWorker.listen();
    const config = fleetConfig({ url: redis.url }, [stubModel([stub], { timeouts: patient })]);
    await using batcher = await Part.start("batcher", config);
    await using part = await Part.start("gateway", config, ["--processes", "2"]);
    assert.equal(childrenOf(part.pid).length, 3);
    await eventually(async () => (await part.post({ input: "first" })).status === 200);
    const id = await part.accept({ input: "accepted" });
    assert.deepEqual((await part.result(id)).output, { of: "accepted" });
    await eventually(async () => (await counter(part, "ferry_requests_total", 'code="202"')) === 1);
    assert.equal(await counter(part, "ferry_batches_total"), 0);
    assert.ok((await counter(batcher, "ferry_batches_total")) >= 2);
  });
});
