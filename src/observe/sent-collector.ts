/** The collector as the thread of the requests sees it: it is spoken to by the thread of `sender.ts`. */
import { type OtlpStart, type Sender, SenderTrouble } from "./sender.ts";
import type { Collector, Delivery } from "./span-buffer.ts";

export function sentCollector(sender: Pick<Sender, "ask">, start: OtlpStart): Collector {
  return {
    deliver: async (spans): Promise<Delivery> => {
      try {
        return await sender.ask("deliverSpans", { start, spans: JSON.stringify(spans) });
      } catch (error) {
        // The next thread gets the same bundle. Whatever else went wrong would go wrong again.
        if (error instanceof SenderTrouble && error.isOfTheThread)
          return { kind: "away", why: error.message };
        throw error;
      }
    },
    close: () => sender.ask("closeSpans", undefined),
  };
}
