/**
 * A worker of the benchmark that is a process of its own, so that it can be killed: protocol `batch`.
 *
 *   node bench/worker.ts PORT MS
 *
 * Every batch takes MS, whatever its size, and gets its inputs back as outputs. Prints the same `ready` line
 * as Ferry.
 */
import { createServer } from "node:http";

const [port, ms] = process.argv.slice(2).map(Number);

const server = createServer((request, response) => {
  const arrivedAt = performance.now();
  const chunks: Buffer[] = [];
  request.on("data", (chunk: Buffer) => chunks.push(chunk));
  request.on("end", () => {
    const { inputs } = JSON.parse(Buffer.concat(chunks).toString()) as { inputs: unknown[] };
    const body = JSON.stringify({ outputs: inputs });
    setTimeout(
      () => {
        response.writeHead(200, {
          "content-type": "application/json",
          "content-length": Buffer.byteLength(body),
        });
        response.end(body);
      },
      arrivedAt + ms! - performance.now(),
    );
  });
});
server.listen(port, "127.0.0.1", () => {
  process.stderr.write(`${JSON.stringify({ level: "info", msg: "ready" })}\n`);
});
process.on("SIGTERM", () => {
  server.closeAllConnections();
  server.close();
});
