/** `ferry workers` from outside, against a listener that answers as Ferry's would. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type IncomingMessage } from "node:http";
import type { AddressInfo } from "node:net";
import { after, before, describe, test } from "node:test";
import { ferry, file } from "./cli-child.ts";

const rows = [
  {
    model: "embed",
    name: "gpu-1:9000",
    address: "http://gpu-1:9000/infer",
    state: "busy",
    in_flight: 12,
    tasks: 3400,
    failures: 2,
    utilization: 0.614,
    ratio: 1.05,
  },
  {
    model: "rank",
    name: "gpu-2:9000",
    state: "down",
    in_flight: 0,
    tasks: 0,
    failures: 3,
    utilization: 0,
    ratio: 1,
    down: { why: "cannot connect\u001b[2J", retry_in_ms: 900 },
  },
];

describe("workers", () => {
  let seen: string[] = [];
  const server = createServer((request: IncomingMessage, response) => {
    const chunks: Buffer[] = [];
    request.on("data", (chunk: Buffer) => chunks.push(chunk));
    request.on("end", () => {
      const { method, url = "", headers } = request;
      const body = Buffer.concat(chunks).toString();
      seen.push(`${method} ${url}${body === "" ? "" : ` ${body}`}`);
      const reply = (status: number, answer?: object): void => {
        response.writeHead(status, { "content-type": "application/json" });
        response.end(answer === undefined ? "" : JSON.stringify(answer));
      };
      if (headers.authorization !== "Bearer the-token") return reply(401, { message: "send the token" });
      if (url.includes("nobody"))
        return reply(404, { error: "NOT_FOUND", message: "there is no worker nobody" });
      if (url.includes("broken")) return reply(500, { message: "an internal error" });
      if (method === "GET") return reply(200, { workers: rows });
      const named = { model: "embed", name: "gpu-3:9000" };
      if (method === "DELETE")
        return url.includes("busy") ? reply(202, { ...named, state: "draining" }) : reply(204);
      return reply(url === "/internal/workers" ? 201 : 200, named);
    });
  });
  let config = "";
  before(async () => {
    server.listen(0, "127.0.0.1");
    await once(server, "listening");
    const { port } = server.address() as AddressInfo;
    config = file(
      "workers.yaml",
      `admin: { listen: 127.0.0.1:${port}, token: the-token }\nmodels: [{ name: a, backend: { kind: simulated } }]\n`,
    );
  });
  after(() => server.close());
  const call = (...args: string[]) => {
    seen = [];
    return ferry("workers", ...args, "-c", config);
  };

  test("list: a table for people, one object a line for programs", async () => {
    const { code, out, err } = await call("list");
    assert.equal(code, 0);
    const [head, first, second] = out.split("\n");
    assert.match(head!, /^ {2}NAME +MODEL +STATE +IN FLIGHT +TASKS +FAILED +BUSY +PACE +WHY$/);
    assert.match(first!, /^ {2}gpu-1:9000 +embed +busy +12 +3400 +2 +61 % +1\.05×$/);
    assert.match(second!, /^ {2}gpu-2:9000 +rank +down +0 +0 +3 +0 % +1× +cannot connect·\[2J$/);
    assert.match(err, /2 workers\. {2}ferry workers add URL · drain NAME · resume NAME · remove NAME/);
    const json = await call("list", "--json", "--model", "rank");
    assert.deepEqual(JSON.parse(json.out), rows[1]);
    assert.equal((await call("list", "--model", "none")).out, "no workers\n");
  });

  test("add, drain, resume, remove: one line, or one object", async () => {
    const added = await call("add", "http://gpu-3:9000/infer", "--model", "embed");
    assert.deepEqual([added.code, added.out], [0, "added gpu-3:9000 to embed\n"]);
    assert.match(added.err, /write it into the config/);
    const body = JSON.stringify({ model: "embed", url: "http://gpu-3:9000/infer" });
    assert.deepEqual(seen, [`POST /internal/workers ${body}`]);
    await call("add");
    assert.deepEqual(seen, ["POST /internal/workers {}"]);
    assert.equal((await call("drain", "gpu-3:9000/x y")).out, "draining gpu-3:9000/x y\n");
    assert.deepEqual(seen, ["POST /internal/workers/gpu-3%3A9000%2Fx%20y/drain"]);
    assert.equal((await call("resume", "g", "--model", "a b")).out, "resumed g\n");
    assert.deepEqual(seen, ["POST /internal/workers/g/resume?model=a%20b"]);
    assert.equal((await call("remove", "g")).out, "removed g\n");
    assert.match((await call("remove", "busy")).out, /^busy drains, and is gone when its batch is over\n$/);
    const json = await call("remove", "busy", "--json");
    assert.deepEqual(JSON.parse(json.out), { model: "embed", name: "gpu-3:9000", state: "draining" });
  });

  test("what is refused is told in the listener's words, exit 1", async () => {
    const unknown = await call("drain", "nobody");
    assert.deepEqual([unknown.code, unknown.out], [1, ""]);
    assert.match(unknown.err, /^ferry: workers drain: there is no worker nobody\n/);
    assert.match(
      (await call("drain", "broken")).err,
      /workers drain: admin listener .* answered 500: an internal/,
    );
    const elsewhere = await ferry("workers", "list", "-c", config, "--admin", "http://127.0.0.1:1");
    assert.equal(elsewhere.code, 1);
    assert.match(elsewhere.err, /workers list: admin listener http:\/\/127\.0\.0\.1:1 cannot be reached/);
  });

  const wrong: readonly (readonly [string, RegExp])[] = [
    ["", /workers needs a word; one of list, add, drain, resume, remove/],
    ["drian x", /workers drian is unknown; did you mean drain\?/],
    ["list x", /workers list: unexpected x/],
    ["add a b", /workers add: unexpected b/],
    ["drain", /workers drain needs the name of a worker; ferry workers list shows them/],
    ["list --admin ftp://x", /--admin must be a URL/],
  ];
  for (const [line, message] of wrong) {
    test(`called wrongly: ferry workers ${line}`, async () => {
      const { code, err } = await ferry("workers", ...line.split(" ").filter((word) => word !== ""));
      assert.equal(code, 2);
      assert.match(err, message);
    });
  }
});
