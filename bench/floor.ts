/**
 * The floor: the least a Node HTTP server can do for the same request, as the measure for Ferry.
 *
 *   node bench/floor.ts PORT
 *
 * Reads the body of every request and sends it back, as Ferry with a simulated worker does. It does not
 * parse, route, check or log; it keeps the defaults of `node:http`. What Ferry's throughput lacks to this
 * one is what Ferry costs. Prints the same `ready` line as Ferry, so both start the same way.
 */
import { createServer } from "node:http";

const port = Number(process.argv[2]);

const server = createServer((request, response) => {
  const chunks: Buffer[] = [];
  request.on("data", (chunk: Buffer) => chunks.push(chunk));
  request.on("end", () => {
    const body = chunks.length === 1 ? chunks[0]! : Buffer.concat(chunks);
    response.writeHead(200, { "content-type": "application/json", "content-length": body.length });
    response.end(body);
  });
});
server.listen(port, "127.0.0.1", () => {
  process.stderr.write(`${JSON.stringify({ level: "info", msg: "ready" })}\n`);
});
process.on("SIGTERM", () => {
  server.closeAllConnections();
  server.close();
});
