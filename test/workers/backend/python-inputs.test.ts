import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { fileURLToPath } from "node:url";
import fc from "fast-check";
import { type InputKind, PythonBackend } from "../../../src/workers/backend/python.ts";
import { SystemClock } from "../../../src/app/clock.ts";
import { Events } from "../../../src/observe/events.ts";
import { batchOf, outputsOf } from "../../contract/backend.ts";
import { describe, test } from "./suite.ts";

const PYTHON = execFileSync("python3", ["-c", "import sys; print(sys.executable)"], {
  encoding: "utf8",
}).trim();
process.env["PYTHONDONTWRITEBYTECODE"] = "1";
const never = new AbortController().signal;

type Ask = (inputs: readonly string[], parameters?: string) => Promise<readonly string[] | string>;

/** Outputs, or why the batch was rejected. */
async function asking(fn: string, inputs: InputKind, check: (ask: Ask) => Promise<void>): Promise<void> {
  const file = fileURLToPath(new URL("models/array_inputs.py", import.meta.url));
  const backend = new PythonBackend(
    {
      function: `${file}:${fn}`,
      workers: 1,
      python: PYTHON,
      startTimeoutMs: 20_000,
      maxReplyBytes: 4e6,
      inputs,
    },
    { model: "m", clock: new SystemClock(), events: new Events() },
  );
  await backend.start();
  try {
    await check(async (texts, parameters = "") => {
      const batch = batchOf([...texts], parameters);
      const reply = await backend.workers[0]!.run(batch, never);
      return reply.kind === "rejected" ? reply.message : outputsOf(batch, reply);
    });
  } finally {
    await backend.stop();
  }
}

describe("inputs as arrays", () => {
  test("each its own, of whatever length, with all of them in one block", async () => {
    await asking("told", "int32", async (ask) => {
      const said = (await ask(["[1,2,3]", "[]", "[ -4 ]"], '{"é":1}')) as readonly string[];
      const all = '"i",4,{"é":1}]';
      assert.deepEqual(said, [`["i",[1,2,3],${all}`, `["i",[],${all}`, `["i",[-4],${all}`]);
    });
    await asking("told", "float32", async (ask) => {
      assert.deepEqual(await ask(["[0.5,1e3]"]), ['["f",[0.5,1000.0],"f",2,{}]']);
    });
  });

  test("may be written into, and returned as one block", async () => {
    await asking("doubled", "int64", async (ask) => {
      assert.deepEqual(await ask(["[1,9007199254740991]", "[3]"]), ["[2,18014398509481982]", "[6]"]);
    });
    await asking("rows", "int32", async (ask) => {
      const [first] = (await ask(["[1,2]", "[3,4]"])) as readonly string[];
      assert.equal(first, '{"$tensor":"int32","shape":[2],"base64":"AQAAAAIAAAA="}');
    });
  });

  test("whatever they are: the numbers that were sent, or a word about what they must be", async () => {
    const numbers = fc.array(fc.oneof(fc.integer(), fc.maxSafeInteger(), fc.double({ noNaN: true })), {
      maxLength: 5,
    });
    const any = fc.oneof(numbers, fc.array(fc.integer(), { maxLength: 300 }), fc.jsonValue());
    await asking("told", "int32", async (ask) => {
      await fc.assert(
        fc.asyncProperty(fc.array(any, { minLength: 1, maxLength: 6 }), async (inputs) => {
          const fits = inputs.every(
            (each) =>
              Array.isArray(each) && each.every((one) => typeof one === "number" && (one | 0) === one),
          );
          const said = await ask(inputs.map((each) => JSON.stringify(each)));
          if (!fits) return assert.equal(said, "the input must be a flat array of numbers (int32)");
          const lists = (said as readonly string[]).map((each) => (JSON.parse(each) as unknown[])[1]);
          assert.deepEqual(lists, JSON.parse(JSON.stringify(inputs)));
        }),
        { numRuns: 200 },
      );
    });
  });
});
