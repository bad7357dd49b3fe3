/** What a worker's own code printed, line by line, as `worker.printed` events. */
import type { Readable } from "node:stream";
import { StringDecoder } from "node:string_decoder";
import type { Surroundings } from "./restart.ts";

/** A longer line comes out in pieces of this many characters: nothing is lost and nothing grows. */
export const MAX_LINE_CHARS = 8_192;

/** Reads `stream` to its end, always, so that the worker never blocks on a full pipe. */
export function printLines(
  stream: Readable,
  name: "stdout" | "stderr",
  worker: string,
  { model, events }: Surroundings,
): void {
  const decoder = new StringDecoder("utf8");
  let rest = "";
  const print = (line: string): void =>
    events.emit("worker.printed", { model, worker, stream: name, line: line.replace(/\r$/, "") });
  stream.on("data", (chunk: Buffer) => {
    const text = rest + decoder.write(chunk);
    let start = 0;
    for (;;) {
      const end = text.indexOf("\n", start);
      const stop = end < 0 ? text.length : end;
      while (stop - start > MAX_LINE_CHARS) {
        print(text.slice(start, start + MAX_LINE_CHARS));
        start += MAX_LINE_CHARS;
      }
      if (end < 0) break;
      print(text.slice(start, end));
      start = end + 1;
    }
    rest = text.slice(start);
  });
  stream.on("end", () => {
    rest += decoder.end();
    if (rest !== "") print(rest);
  });
  // A broken pipe means that the worker is gone, and that is noticed elsewhere.
  stream.on("error", () => {});
}
