import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { accepted, bytesHeaders, encodingNamed, outputText } from "../../src/gateway/reply.ts";

describe("Accept", () => {
  const cases: [string | undefined, ReturnType<typeof accepted>][] = [
    [undefined, "json"],
    ["", "json"],
    ["*/*", "json"],
    ["application/*", "json"],
    ["application/json", "json"],
    ["text/html, image/png", "json"],
    ["application/octet-stream", "bytes"],
    ["Application/Octet-Stream", "bytes"],
    ["application/octet-stream;q=0.1", "bytes"],
    ["application/octet-stream;q=0", "json"],
    ["application/octet-stream, application/json", "either"],
    ["application/json, application/octet-stream", "either"],
    ["application/octet-stream, */*;q=0.8", "either"],
    ["application/octet-stream, */*;q=0", "bytes"],
    ["application/octet-stream, application/json;q=0, */*", "bytes"],
    ["application/octet-stream;q=0.5, application/json", "json"],
    ["application/octet-stream; q = 0.5 , application/json ; q=0.4", "either"],
    ["application/octet-stream;q=0.5, */*", "json"],
    ["application/octet-stream;q=2", "bytes"],
    ["application/octet-stream;v=1;q=0.5, application/*;q=0.6", "json"],
    ["application/octet-stream-ish", "json"],
  ];
  for (const [header, wanted] of cases) {
    test(`${String(header)} is ${wanted}`, () => {
      assert.equal(accepted(header), wanted);
    });
  }
});

describe("an output that is bytes", () => {
  const tensor = { dtype: "float32", shape: [1, 2], base64: "zczMPQAAgD8=" } as const;

  test("is base64 with its type and shape, or numbers", () => {
    const base64 = `"output":"zczMPQAAgD8=","encoding":"base64","dtype":"float32","shape":[1,2]`;
    assert.equal(outputText(tensor, "base64"), base64);
    assert.equal(outputText(tensor, "json"), `"output":[[0.1,1]]`);
    const bytes = `"output":"zczM","encoding":"base64"`;
    assert.equal(outputText({ base64: "zczM" }, "base64"), bytes);
    assert.equal(outputText({ base64: "zczM" }, "json"), bytes);
  });

  test("says what it is in headers where nothing else can", () => {
    assert.deepEqual(bytesHeaders(tensor), ["x-ferry-dtype", "float32", "x-ferry-shape", "1,2"]);
    assert.deepEqual(bytesHeaders({ base64: "" }), []);
  });

  test("has no other encodings", () => {
    assert.equal(encodingNamed(undefined, "it"), "base64");
    for (const name of ["hex", "", 7, null, "BASE64"]) {
      assert.throws(() => encodingNamed(name, "it"), /it must be "base64" or "json"/);
    }
  });
});
