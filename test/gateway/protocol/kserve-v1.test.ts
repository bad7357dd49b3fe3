/** Instances become tasks and come back as predictions, in their order and as the text they were. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { Refusal } from "../../../src/core/errors.ts";
import { kserveV1 } from "../../../src/gateway/protocol/kserve-v1.ts";
import type { WorkerCall, Drafts, Outputs, Unbatched } from "../../../src/gateway/protocol/protocol.ts";
import { LIMITS } from "./spoken.ts";

const { worker, client } = kserveV1;

function ask(body: string, names: Record<string, string> = { model: "m" }, route = 0): Drafts | Unbatched {
  const header = (): undefined => undefined;
  return client.infer[route]!.read({ names, body: Buffer.from(body), limits: LIMITS, header });
}

function drafts(body: string, names?: Record<string, string>): Drafts {
  const found = ask(body, names);
  assert.ok(!("unbatched" in found));
  return found;
}

const call = (inputs: readonly string[], parameters: string): WorkerCall =>
  worker.call(inputs, parameters, "m b");
const reply = (body: string): Outputs =>
  worker.outputs({ header: () => undefined, body: Buffer.from(body) }, [], "");

describe("kserve-v1", () => {
  test("number texts are not touched on either way", () => {
    const request = drafts('{"instances":[ 9007199254740993 ,[1.0,-0.10],{"x":1e-7}]}');
    const { inputs, parameters } = request;
    assert.deepEqual(inputs, ["9007199254740993", "[1.0,-0.10]", '{"x":1e-7}']);
    assert.equal(parameters, "");
    assert.equal(call(inputs, parameters).body, '{"instances":[9007199254740993,[1.0,-0.10],{"x":1e-7}]}');
    const { outputs } = reply('{"predictions": [1.0, [9223372036854775807], {"y": 2.50}]}');
    assert.equal(
      request.render(outputs!, "m").body,
      '{"predictions":[1.0,[9223372036854775807],{"y": 2.50}]}',
    );
  });

  test("instances come back in order whatever the batch", () => {
    fc.assert(
      fc.property(
        // A key "__proto__" is refused, whatever stands under it.
        fc
          .array(fc.jsonValue({ maxDepth: 2 }), { minLength: 1 })
          .filter((all) => !JSON.stringify(all).includes("__proto__")),
        fc.integer({ min: 1, max: 4 }),
        (all, size) => {
          const request = drafts(JSON.stringify({ instances: all }));
          const { inputs, parameters } = request;
          const outputs: string[] = [];
          for (let at = 0; at < inputs.length; at += size) {
            const { instances } = JSON.parse(
              call(inputs.slice(at, at + size), parameters).body as string,
            ) as { instances: unknown[] };
            outputs.push(...reply(JSON.stringify({ predictions: instances.map((of) => ({ of })) })).outputs!);
          }
          const answer = JSON.parse(request.render(outputs, "m").body as string) as unknown;
          assert.deepEqual(answer, JSON.parse(JSON.stringify({ predictions: all.map((of) => ({ of })) })));
        },
      ),
    );
  });

  test("signature, version and whatever else stands there keep requests apart", () => {
    const keys = [
      drafts('{"instances":[1]}').parameters,
      drafts('{"instances":[1],"signature_name":"a"}').parameters,
      drafts('{"instances":[1],"signature_name":"b"}').parameters,
      drafts('{"instances":[1],"parameters":{"k":1}}').parameters,
      drafts('{"instances":[1]}', { model: "m", version: "2" }).parameters,
    ];
    assert.equal(new Set(keys).size, keys.length);
    assert.equal(drafts('{"signature_name":null,"instances":[1]}').parameters, keys[0]);
    assert.deepEqual(call(["1"], keys[1]!), { body: '{"signature_name":"a","instances":[1]}' });
    assert.deepEqual(call(["1"], keys[4]!), {
      body: '{"instances":[1]}',
      path: "/v1/models/m%20b/versions/2:predict",
      named: true,
    });
    for (const version of ["../../other", "..\\x", "1/./2", ".."])
      assert.match(call(["1"], JSON.stringify({ $version: version })).flaw!, /version must be/);
  });

  test("columns and labels pass the batches by", () => {
    assert.ok("unbatched" in ask('{"inputs":{"x":[1]}}'));
    assert.ok("unbatched" in ask("anything", { model: "m", label: "stable" }, 2));
  });

  test("what is wrong is said", () => {
    const cases: [body: string, words: RegExp][] = [
      ["{}", /"instances" is missing/],
      ['{"instances":[]}', /empty/],
      ['{"instances":{}}', /must be an array/],
      ['{"instances":[1],"inputs":[1]}', /not both/],
      ['{"instances":[1],"signature_name":3}', /"signature_name" must be a string/],
      ['{"instances":[NaN]}', /not valid JSON/],
      ['{"instances":[1],"$version":"2"}', /unknown field/],
    ];
    for (const [body, words] of cases) {
      assert.throws(
        () => ask(body),
        (error) => error instanceof Refusal && words.test(error.message),
        body,
      );
    }
  });

  test("a worker that says something else says nothing", () => {
    assert.match(reply("{}").flaw!, /no "predictions"/);
    assert.match(reply('{"predictions":{"a":1}}').flaw!, /not an array/);
    assert.match(reply('{"predictions":[1],"predictions":[2]}').flaw!, /twice/);
    assert.match(reply('{"predictions":[1e999]}').flaw!, /range/);
    assert.equal(reply('{"predictions":[1,2]}').outputs!.length, 2);
  });

  test("a worker's URL says where its base is and what it calls the model", () => {
    assert.equal(worker.basePath("/v1/models/m:predict"), "");
    assert.equal(worker.basePath("/tf/v1/models/m/versions/3:predict"), "/tf");
    assert.equal(worker.modelOf!("/v1/models/m/labels/stable:predict"), "m");
  });

  test("errors have one field", () => {
    const answer = client.fail(new Refusal("INPUT_REJECTED", "too long"));
    assert.deepEqual(answer, { status: 400, body: '{"error":"too long"}' });
  });
});
