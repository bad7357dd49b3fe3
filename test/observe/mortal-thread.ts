/** A thread for `sender.test.ts`: answers what it is told, and dies when it is asked for rows. */
import { parentPort, threadId } from "node:worker_threads";
import type { Answer, Question } from "../../src/observe/sender.ts";

parentPort!.on("message", ({ number, verb }: Question) => {
  if (verb === "findRows") throw new Error("a bug in the thread");
  const answer: Answer =
    verb === "deleteOldRows"
      ? { number, value: threadId }
      : { number, trouble: "it refuses", state: verb === "insertRows" ? "22000" : "" };
  parentPort!.postMessage(answer);
});
