/**
 * A model server of the benchmark with OpenAI's embeddings API, in a process of its own.
 *
 *   node bench/embeddings.ts PORT MS
 *
 * Every call takes MS, however many inputs it has, and there is one at a time: the others wait. An embedding has
 * 1,536 float32 as base64, and begins with the first 16 characters of its input (which are such base64 already), so
 * that a caller knows its own. Prints the same `ready` line as Ferry.
 */
import { createServer } from "node:http";
import { markerLength } from "../src/cli/bench/connection.ts";

const [port, ms] = process.argv.slice(2).map(Number);
const floats = 1536;
const rest = "A".repeat((floats * 4 * 4) / 3 - markerLength);

interface Call {
  readonly model: string;
  readonly input: string | readonly string[];
}

function answer({ model, input }: Call): string {
  const inputs = typeof input === "string" ? [input] : input;
  const data = inputs.map((text, index) => ({
    object: "embedding",
    index,
    embedding: text.slice(0, markerLength) + rest,
  }));
  const usage = { prompt_tokens: inputs.length, total_tokens: inputs.length };
  return JSON.stringify({ object: "list", data, model, usage });
}

/** When the last of those that came before is done; performance.now(). */
let freeAt = 0;

const server = createServer((request, response) => {
  const chunks: Buffer[] = [];
  request.on("data", (chunk: Buffer) => chunks.push(chunk));
  request.on("end", () => {
    const body = answer(JSON.parse(Buffer.concat(chunks).toString()) as Call);
    freeAt = Math.max(freeAt, performance.now()) + ms!;
    setTimeout(() => {
      response.writeHead(200, {
        "content-type": "application/json",
        "content-length": Buffer.byteLength(body),
      });
      response.end(body);
    }, freeAt - performance.now());
  });
});
server.listen(port, "127.0.0.1", () => {
  process.stderr.write(`${JSON.stringify({ level: "info", msg: "ready" })}\n`);
});
process.on("SIGTERM", () => {
  server.closeAllConnections();
  server.close();
  // Whoever still waits is not answered any more.
  process.exit(0);
});
