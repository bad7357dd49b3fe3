/**
 * The table of settings as flat rows, in order: what documents and messages need.
 *
 * A path names where a setting stands: `[]` for each of a list, `NAME` for each of a named map. The
 * settings of a one-of carry the kind they belong to.
 */
import { choice, type Fields, type Group, type Leaf, type OneOf, type Setting } from "./setting-kinds.ts";
import { settings } from "./settings.ts";

export interface Row {
  readonly path: string;
  readonly leaf: Leaf<unknown>;
  /** The list's own words, where the leaf is one of a list. */
  readonly doc: string;
  /** Only with this `kind` beside it; "" for any. */
  readonly onlyKind: string;
}

export function rowsOf(fields: Fields, prefix = ""): Row[] {
  return Object.entries(fields).flatMap(([name, setting]) =>
    rowsAt(setting, prefix === "" ? name : `${prefix}.${name}`),
  );
}

function rowsAt(setting: Setting, path: string): Row[] {
  switch (setting.type) {
    case "leaf":
      return [{ path, leaf: setting, doc: setting.doc, onlyKind: "" }];
    case "group":
      return rowsOf(setting.fields, path);
    case "named":
      return rowsOf(setting.fields, `${path}.NAME`);
    case "list": {
      const each = setting.each as Setting;
      const rows = rowsAt(each, `${path}[]`);
      if (each.type !== "leaf") return rows;
      return rows.map((row) => ({ ...row, doc: setting.doc, leaf: { ...row.leaf, defaultText: "" } }));
    }
    case "one-of":
      return [
        ...rowsAt(kindLeaf(setting), `${path}.kind`),
        ...Object.entries(setting.variants).flatMap(([kind, variant]) =>
          rowsOf(variant.fields, path).map((row) => ({ ...row, onlyKind: kind })),
        ),
      ];
  }
}

/** The `kind` of a one-of, which the table holds only as the names of its variants. */
function kindLeaf(setting: OneOf<{ readonly [kind: string]: Group<Fields> }>): Leaf<unknown> {
  const kinds = Object.keys(setting.variants);
  const leaf = choice(setting.doc, kinds, setting.fallback ?? kinds[0]!);
  if (setting.fallback !== undefined) return leaf;
  return { ...leaf, need: "required", fallback: undefined, defaultText: "" };
}

export const settingRows: readonly Row[] = rowsOf(settings.fields);

/** Without the `[]` of a list's own values: `models[].backend.workers`. */
export const settingPaths: readonly string[] = settingRows.map((row) => row.path.replace(/\[\]$/, ""));
