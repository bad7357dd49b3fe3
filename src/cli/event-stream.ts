/** Parser for server-sent events: name and data of each; comments and other fields are ignored. */

export interface StreamEvent {
  readonly name: string;
  readonly data: string;
}

/** Far above any hello; a longer event does not come from Ferry. */
const MAX_EVENT = 16 * 1024 * 1024;

export class StreamTooLong extends Error {}

export async function* readEvents(chunks: AsyncIterable<Uint8Array>): AsyncGenerator<StreamEvent> {
  const decoder = new TextDecoder();
  let text = "";
  for await (const chunk of chunks) {
    // Only new text can contain the end of an event, apart from its first line feed.
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
