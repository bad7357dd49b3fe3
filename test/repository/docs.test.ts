/**
 * The manual hangs together: every page is linked from the README and from the index of docs/, every relative link leads
 * to a file that is there, and every anchor to a heading.
 *
 * Anchors are those that GitHub makes of headings: lower case, punctuation gone, spaces as hyphens, `-1`, `-2` for
 * headings that were there before.
 */
import assert from "node:assert/strict";
import { globSync, readFileSync, statSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { describe, test } from "node:test";

const root = join(import.meta.dirname, "../..");
const pages = globSync("**/*.md", { cwd: root, exclude: ["node_modules", "dist"] }).sort();

/** Without what stands between fences, where nothing is a heading or a link. */
function prose(file: string): string {
  const text = readFileSync(join(root, file), "utf8");
  return text.replace(/^( *)(```+|~~~+)[^]*?^\1\2.*$/gm, "");
}

function anchors(file: string): Set<string> {
  const found = new Set<string>();
  for (const [, heading] of prose(file).matchAll(/^#{1,6} +(.+?) *#*$/gm)) {
    const shown = heading!.replace(/\[([^\]]*)\]\([^)]*\)/g, "$1").toLowerCase();
    const base = shown.replace(/[^\p{L}\p{N}\p{M} _-]/gu, "").replaceAll(" ", "-");
    let name = base;
    for (let again = 1; found.has(name); again++) name = `${base}-${again}`;
    found.add(name);
  }
  return found;
}

interface Link {
  readonly to: string;
  readonly anchor: string | undefined;
}

/** Relative links of a page, as paths from the root; those in `code` are no links. */
function links(file: string): Link[] {
  const text = prose(file).replace(/(`+)[^`][^]*?\1/g, "");
  const targets = [...text.matchAll(/\]\(([^()\s]+)\)|^\[[^\]]+\]: *(\S+)/gm)].map(
    (link) => link[1] ?? link[2]!,
  );
  return targets
    .filter((target) => !/^[a-z][a-z+.-]*:/i.test(target))
    .map((target) => {
      const [path = "", anchor] = target.split("#");
      return { to: path === "" ? file : relative(root, join(root, dirname(file), path)), anchor };
    });
}

describe("links", () => {
  for (const file of pages) {
    test(`${file}: every link leads somewhere`, () => {
      for (const { to, anchor } of links(file)) {
        assert.ok(statSync(join(root, to), { throwIfNoEntry: false }) !== undefined, `${file} → ${to}`);
        if (anchor !== undefined && to.endsWith(".md"))
          assert.ok(anchors(to).has(anchor), `${file} → ${to}#${anchor}`);
      }
    });
  }
});

describe("the index", () => {
  const manual = pages.filter((file) => dirname(file) === "docs" && file !== "docs/README.md");
  for (const index of ["README.md", "docs/README.md"]) {
    test(`${index} links to every page of docs/`, () => {
      const linked = new Set(links(index).map(({ to }) => to));
      assert.deepEqual(
        manual.filter((file) => !linked.has(file)),
        [],
      );
    });
  }
});
