/** What `npm run audit` makes of what npm prints: a clean bill, findings, and no answer, which is neither. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { judge } from "../../scripts/audit.ts";

test("nothing known is said with the number of packages that were asked about", () => {
  const verdict = judge(
    JSON.stringify({ auditReportVersion: 2, vulnerabilities: {}, metadata: { dependencies: { prod: 32 } } }),
  );
  assert.deepEqual(verdict, {
    asked: true,
    found: 0,
    text: "audit: 32 packages of production, no known vulnerable",
  });
});

test("what is known is listed, with its cause and what mends it", () => {
  const via = [{ title: "Hangs on a long line", url: "https://example.test/1" }];
  const verdict = judge(
    JSON.stringify({
      auditReportVersion: 2,
      vulnerabilities: {
        yaml: {
          severity: "high",
          range: "<3.0.0",
          via,
          fixAvailable: { name: "yaml", version: "3.0.0" },
        },
        pino: { severity: "low", range: "*", via: ["sonic-boom"], fixAvailable: false },
      },
    }),
  );
  assert.equal(verdict.found, 2);
  assert.deepEqual(verdict.text.split("\n"), [
    "audit: 2 known vulnerable",
    "  high yaml <3.0.0: Hangs on a long line https://example.test/1; fix: yaml@3.0.0",
    "  low pino *: through sonic-boom; no fix yet",
  ]);
});

test("a registry that does not answer is no clean bill, and its address is not repeated", () => {
  const refused = { message: "405 Method Not Allowed - POST https://registry.test/bulk", statusCode: 405 };
  for (const printed of [JSON.stringify(refused), "", "<html>", "{}"]) {
    const verdict = judge(printed);
    assert.equal(verdict.asked, false);
    assert.match(verdict.text, /NOTHING WAS CHECKED/);
    assert.doesNotMatch(verdict.text, /registry\.test/);
  }
  assert.match(judge(JSON.stringify(refused)).text, /405 Method Not Allowed\)/);
});
