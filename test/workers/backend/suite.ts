/**
 * node:test's functions as what they are to a test file: calls whose promise nobody waits for. The tests
 * of a group share nothing, so they run side by side; most of their time is spent waiting for a child.
 */
import * as nodeTest from "node:test";

export function describe(name: string, body: () => void): void {
  void nodeTest.describe(name, { concurrency: 4 }, body);
}

export const test = nodeTest.test as (name: string, body: () => void | Promise<void>) => void;
