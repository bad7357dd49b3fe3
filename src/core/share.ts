/**
 * How tenants share a bounded resource: bytes of results that wait to be fetched, groups of queued tasks.
 *
 * A tenant may take more while it holds less than is left free (dynamic thresholds, Choudhury and Hahne 1998):
 *
 *   mine < max( bound − all, bound / (8 · (holders + 1)) )
 *
 * One tenant alone gets half, two get a third each, n get 1/(n + 1) each: some of it is always free for the next.
 * What is promised already may come to more than the bound (outputs are larger than they were when tasks were
 * accepted), and leave nothing free. The second term is what each tenant keeps then, whatever the others hold; it
 * can add ln(n)/8 of the bound in all.
 */
const FLOOR = 8;

/** Whether a tenant that holds `mine` of `bound` may take more; `all` is what the `holders` hold together. */
export function hasShare(mine: number, all: number, bound: number, holders: number): boolean {
  return mine < Math.max(bound - all, bound / (FLOOR * (holders + 1)));
}
