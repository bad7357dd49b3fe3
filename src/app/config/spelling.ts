/**
 * "Did you mean …?" for settings, choices, commands and flags.
 *
 * Distance counts inserted, deleted, replaced and swapped letters, ignoring case. A guess is offered only if at most a
 * third of the word is wrong, or one name begins with the other (`maxWait` for `maxWaitMs`): a wrong guess is worse
 * than none.
 */

/** Longer words are no typo of our names; also bounds the work. */
const maxWordLength = 64;

export function nearest(word: string, known: Iterable<string>): string | undefined {
  if (word.length > maxWordLength) return undefined;
  const wanted = word.toLowerCase();
  let best: string | undefined;
  let bestDistance = Math.floor(word.length / 3) + 1;
  for (const name of known) {
    const candidate = name.toLowerCase();
    const begins = wanted.length >= 3 && (candidate.startsWith(wanted) || wanted.startsWith(candidate));
    const distance = begins ? Math.min(1, editDistance(wanted, candidate)) : editDistance(wanted, candidate);
    if (distance < bestDistance) [best, bestDistance] = [name, distance];
  }
  return best;
}

/** "; did you mean X?", or "" if no name is near. */
export function didYouMean(word: string, known: Iterable<string>): string {
  const guess = nearest(word, known);
  return guess === undefined ? "" : `; did you mean ${guess}?`;
}

export function editDistance(a: string, b: string): number {
  let older: number[] = [];
  let previous = Array.from({ length: b.length + 1 }, (_, index) => index);
  for (let i = 1; i <= a.length; i += 1) {
    const current = [i];
    for (let j = 1; j <= b.length; j += 1) {
      const same = a[i - 1] === b[j - 1];
      let cost = Math.min(previous[j - 1]! + (same ? 0 : 1), previous[j]! + 1, current[j - 1]! + 1);
      const swapped = i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1];
      if (swapped) cost = Math.min(cost, older[j - 2]! + 1);
      current.push(cost);
    }
    [older, previous] = [previous, current];
  }
  return previous[b.length]!;
}
