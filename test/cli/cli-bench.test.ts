/** `ferry bench` from outside, as far as it gets without a server: help, and every way to call it wrongly. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { bench } from "../../src/cli/bench.ts";
import { ferry, file } from "./cli-child.ts";

test("help has two examples and every flag", async () => {
  const { code, out, err } = await ferry("bench", "--help");
  assert.deepEqual([code, err], [0, ""]);
  assert.equal(out.match(/^ {2}ferry .* # .*$/gm)?.length, 2, out);
  assert.ok(out.includes(`Usage: ferry ${bench.usage}\n`));
  for (const flag of Object.keys(bench.flags)) assert.ok(out.includes(`--${flag}`), flag);
});

const wrong: readonly (readonly [string, RegExp])[] = [
  ["", /bench needs --rate N, requests a second \(or --closed -c N\)/],
  ["--rate fast", /--rate fast is no rate; write requests a second, like 1800/],
  ["--rate 10 --duration 30", /--duration 30 is no time; write 500ms, 30s or 2m/],
  ["--rate 10 --slo p98=1s", /--slo p98=1s is no goal: its name is not one of p50/],
  ["--rate 10 --arrivals evn", /--arrivals evn is not one of poisson, even; did you mean even\?/],
  ["--rate 10 --closed", /--closed has no --rate/],
  ["--rate 10 --callers 3", /callers are for the closed loop; add --closed/],
  ["--rate 10 -c 3", /callers are for the closed loop; add --closed/],
  ["--rate 10 ferry.yaml", /did you mean -c ferry\.yaml\?/],
  ["--rate 10 http://u:p@x", /is no URL like http:\/\/127\.0\.0\.1:8080, without credentials/],
  ["--rate 10 --mix free=60", /--mix free needs the tier's key: a line free=KEY in --keys FILE/],
  ["--rate 10 --mix free", /--mix free is no mix; write enterprise=10,paid=30,free=60/],
  ["--rate 10 --tier free", /--tier free needs the tier's key/],
  ["--rate 10 --connections 0", /--connections 0 must be a whole number from 1 to 60,000/],
  ["--compare a.json", /--compare needs two files that --save wrote/],
];
for (const [line, expected] of wrong) {
  test(`ferry bench ${line}: exit 2`, async () => {
    const { code, out, err } = await ferry("bench", ...line.split(" ").filter((word) => word !== ""));
    assert.equal(code, 2);
    assert.equal(out, "");
    assert.match(err, expected);
    assert.match(err, /\nUsage: ferry bench/);
  });
}

test("files that cannot be used: exit 1, one line", async () => {
  const bad = file("inputs.ndjson", '"a"\nb\n');
  const calls: readonly (readonly [readonly string[], RegExp])[] = [
    [["--input", `@${bad}`], /--input @.* cannot be used \(line 2 is no JSON/],
    [["--input", "@/nowhere"], /--input @\/nowhere cannot be used \(ENOENT\)/],
    [["--keys", "/nowhere"], /--keys \/nowhere cannot be read \(ENOENT\)/],
  ];
  for (const [words, expected] of calls) {
    const { code, out, err } = await ferry("bench", "--rate", "10", ...words);
    assert.deepEqual([code, out], [1, ""]);
    assert.match(err, expected);
    assert.equal(err.split("\n").length, 2);
  }
});
