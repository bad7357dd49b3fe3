/** How requests differ, whatever they speak. */
import type { Dice } from "./plan.ts";

/** Most ask for one or a few, some for more than fit a batch. */
export function howMany(dice: Dice): number {
  const roll = dice.share();
  if (roll < 0.55) return 1;
  if (roll < 0.9) return dice.between(2, 5);
  return roll < 0.99 ? dice.between(6, 16) : dice.between(17, 80);
}
