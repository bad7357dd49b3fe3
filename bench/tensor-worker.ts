/**
 * A worker of the benchmark that speaks the Open Inference Protocol and echoes, at as little cost as can be.
 *
 *   node bench/tensor-worker.ts PORT
 *
 * Prints the same `ready` line as Ferry.
 */
import { createServer } from "node:http";
import { echoed, HEADER } from "./tensors.ts";

const server = createServer({ keepAliveTimeout: 60_000 }, (request, response) => {
  const chunks: Buffer[] = [];
  request.on("data", (chunk: Buffer) => chunks.push(chunk));
  request.on("end", () => {
    const { head, body } = echoed(Buffer.concat(chunks), request.headers[HEADER] as string | undefined);
    response.writeHead(200, { ...head, "content-length": body.length });
    response.end(body);
  });
});
server.listen(Number(process.argv[2]), "127.0.0.1", () => {
  process.stderr.write(`${JSON.stringify({ level: "info", msg: "ready" })}\n`);
});
process.on("SIGTERM", () => {
  server.closeAllConnections();
  server.close();
});
