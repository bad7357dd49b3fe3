/** The kind of setting that is a deny pattern (`core/pattern.ts` says what one may hold). */
import { compilePattern, MAX_PATTERN_LENGTH, PatternMistake } from "../../core/pattern.ts";
import { leaf, type Leaf } from "./setting-kinds.ts";

export function pattern(doc: string, example: string): Leaf<string> {
  return leaf<string>({
    kind: "pattern",
    doc,
    bounds: `1 to ${MAX_PATTERN_LENGTH} characters`,
    example,
    read({ value }) {
      if (typeof value !== "string") return { wrong: "is not text; put it in single quotes" };
      try {
        compilePattern(value);
        return { value };
      } catch (error) {
        if (error instanceof PatternMistake) return { wrong: error.message };
        throw error;
      }
    },
  });
}
