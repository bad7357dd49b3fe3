/**
 * One exchange with a Redis server: connect, send, read as many replies as commands, hang up.
 *
 * The tests' own client, so that what is tested (the engine and its connections) never vouches for itself.
 * A connection per exchange costs about 0.3 ms here and cannot be left in a strange state by a server that
 * was killed, paused or promoted in between. RESP2 only: a reply is a string, a number, null or a list.
 */
import { connect } from "node:net";

export type Reply = string | number | null | Reply[];

/** The server answered, and its answer is an error: `message` is its text, such as "LOADING …". */
export class ErrorReply extends Error {}

/** Rejects with an ErrorReply when one of the replies is an error, and when `limitMs` pass in silence. */
export function exchange(
  port: number,
  commands: readonly (readonly string[])[],
  limitMs: number,
): Promise<Reply[]> {
  const { promise, resolve, reject } = Promise.withResolvers<Reply[]>();
  const socket = connect({ host: "127.0.0.1", port, noDelay: true });
  const asked = commands.map(([verb]) => verb).join(", ");
  let received: Buffer = Buffer.alloc(0);
  socket.setTimeout(limitMs, () => {
    socket.destroy(new Error(`127.0.0.1:${port} did not answer ${asked} within ${limitMs} ms`));
  });
  socket.on("data", (chunk: Buffer) => {
    received = Buffer.concat([received, chunk]);
    const replies: Reply[] = [];
    let at = 0;
    while (replies.length < commands.length) {
      const found = read(received, at);
      if (found === undefined) return;
      if (found.reply instanceof ErrorReply) return void socket.destroy(found.reply);
      replies.push(found.reply);
      at = found.end;
    }
    resolve(replies);
    socket.destroy();
  });
  socket.on("error", reject);
  // After resolve or another reject this does nothing.
  socket.on("close", () => reject(new Error(`127.0.0.1:${port} hung up before it answered ${asked}`)));
  socket.write(commands.map(encode).join(""));
  return promise;
}

function encode(words: readonly string[]): string {
  return `*${words.length}\r\n${words.map((word) => `$${Buffer.byteLength(word)}\r\n${word}\r\n`).join("")}`;
}

interface Found<T> {
  readonly reply: T;
  /** Where the next reply begins. */
  readonly end: number;
}

/** The reply that begins at `at`; undefined while a part of it is still on its way. */
function read(bytes: Buffer, at: number): Found<Reply | ErrorReply> | undefined {
  const lineEnd = bytes.indexOf("\r\n", at);
  if (lineEnd < 0) return undefined;
  const kind = String.fromCharCode(bytes[at]!);
  const line = bytes.toString("utf8", at + 1, lineEnd);
  const end = lineEnd + 2;
  if (kind === "+") return { reply: line, end };
  if (kind === "-") return { reply: new ErrorReply(line), end };
  if (kind === ":") return { reply: Number(line), end };
  if (line === "-1") return { reply: null, end };
  if (kind === "*") return readList(bytes, end, Number(line));
  if (kind !== "$") throw new Error(`not a RESP2 reply: ${kind}${line}`);
  const after = end + Number(line);
  return bytes.length < after + 2 ? undefined : { reply: bytes.toString("utf8", end, after), end: after + 2 };
}

function readList(bytes: Buffer, at: number, length: number): Found<Reply> | undefined {
  const reply: Reply[] = [];
  let end = at;
  while (reply.length < length) {
    const found = read(bytes, end);
    if (found === undefined) return undefined;
    // An error inside a list (a script in MULTI, say) is a value to look at, as redis-cli shows it.
    reply.push(found.reply instanceof ErrorReply ? found.reply.message : found.reply);
    end = found.end;
  }
  return { reply, end };
}

/** As redis-cli prints it to a pipe: one line per value, nothing for null. */
export function textOf(reply: Reply): string {
  return Array.isArray(reply) ? reply.map(textOf).join("\n") : String(reply ?? "");
}
