/**
 * Headers that may stand only once.
 *
 * Of two `Authorization` or `Content-Type` lines Node keeps the first, two `Idempotency-Key` lines become
 * one key with a comma, and a proxy before us may have looked at the other one. So twice is refused.
 */
const SINGLE: ReadonlySet<string> = new Set([
  "authorization",
  "content-encoding",
  "content-type",
  "expect",
  "idempotency-key",
  "x-api-key",
]);
/** Bit n is set when one of them has n letters: most headers need no closer look. */
const LENGTHS = [...SINGLE].reduce((bits, name) => bits | (1 << name.length), 0);

/** The name that stands twice, of headers as Node lists them: name, value, name, value… */
export function repeatedHeader(raw: readonly string[]): string | undefined {
  let seen: string[] | undefined;
  for (let at = 0; at < raw.length; at += 2) {
    const { length } = raw[at]!;
    if (length > 16 || ((LENGTHS >> length) & 1) === 0) continue;
    const name = raw[at]!.toLowerCase();
    if (!SINGLE.has(name)) continue;
    if (seen?.includes(name) === true) return name;
    (seen ??= []).push(name);
  }
  return undefined;
}
