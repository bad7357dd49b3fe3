/** A thread for `sender.test.ts`: answers what it is told, and dies when it is asked for rows. */
import { parentPort, threadId } from "node:worker_threads";
import type { SenderAnswer, SenderQuestion } from "../../src/observe/sender.ts";

parentPort!.on("message", ({ number, verb }: SenderQuestion) => {
  if (verb === "findRows") throw new Error("a bug in the thread");
  const answer: SenderAnswer =
    verb === "deleteOldRows"
      ? { number, value: threadId }
      : { number, trouble: "it refuses", state: verb === "insertRows" ? "22000" : "" };
  parentPort!.postMessage(answer);
});
