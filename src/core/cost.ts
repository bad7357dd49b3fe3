/** What a batch costs. */

/** Lengths are in tokens (`weight.ts`). A padded model computes rows × longest cells, of which `total` are useful. */
export interface BatchShape {
  readonly rows: number;
  readonly longest: number;
  readonly total: number;
  /** The longest of the batch of as many rows that order of arrival would have made. */
  readonly inOrder: number;
}
