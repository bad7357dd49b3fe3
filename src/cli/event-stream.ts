/** Reads server-sent events: the name and the data of each, comments and the rest left out. */

export interface StreamEvent {
  readonly name: string;
  readonly data: string;
}

/** Far above any hello; whoever sends more without an end is not Ferry. */
const MAX_EVENT = 16 * 1024 * 1024;

export class StreamTooLong extends Error {}

export async function* readEvents(chunks: AsyncIterable<Uint8Array>): AsyncGenerator<StreamEvent> {
  const decoder = new TextDecoder();
  let text = "";
  for await (const chunk of chunks) {
    // Only what is new can hold the end of an event, but for its first line feed.
    let from = Math.max(0, text.length - 1);
    text += decoder.decode(chunk, { stream: true });
    let end: number;
    while ((end = text.indexOf("\n\n", from)) >= 0) {
      const event = parseEvent(text.slice(0, end));
      text = text.slice(end + 2);
      from = 0;
      if (event !== undefined) yield event;
    }
    if (text.length > MAX_EVENT) throw new StreamTooLong();
  }
}

function parseEvent(block: string): StreamEvent | undefined {
  let name = "message";
  const data: string[] = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(line.startsWith("data: ") ? 6 : 5));
  }
  return data.length === 0 ? undefined : { name, data: data.join("\n") };
}
