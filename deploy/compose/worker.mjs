/**
 * A toy model: a batch of any size takes 100 ms, as on a GPU, and an embedding is eight numbers made of the input's bytes.
 *
 *   PORT=9000 BATCH_MS=100 node deploy/compose/worker.mjs
 *
 * POST /infer {"inputs":["…"]} answers {"outputs":[[…]]}; GET /health answers 200. One batch at a time, as a GPU.
 */
import { createServer } from "node:http";

const PORT = Number(process.env["PORT"] ?? 9000);
const BATCH_MS = Number(process.env["BATCH_MS"] ?? 100);
const MAX_BYTES = 64 * 1024 * 1024;
let turn = Promise.resolve();

function embed(input) {
  const vector = new Array(8).fill(0);
  const text = Buffer.from(JSON.stringify(input));
  text.forEach((byte, at) => (vector[at % 8] += byte));
  const length = Math.hypot(...vector);
  return vector.map((value) => Number((value / length).toFixed(6)));
}

async function infer(request) {
  const chunks = [];
  let bytes = 0;
  for await (const chunk of request) {
    bytes += chunk.length;
    if (bytes > MAX_BYTES) throw new Error("the batch is too large");
    chunks.push(chunk);
  }
  const { inputs } = JSON.parse(Buffer.concat(chunks).toString());
  turn = turn.then(() => new Promise((done) => setTimeout(done, BATCH_MS)));
  await turn;
  return { outputs: inputs.map(embed) };
}

async function answer(request, response) {
  const send = (status, body) =>
    response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(body));
  if (request.method === "GET" && request.url === "/health") return send(200, {});
  if (request.method !== "POST" || request.url !== "/infer") return send(404, { error: "POST /infer" });
  try {
    send(200, await infer(request));
  } catch (error) {
    send(400, { error: String(error) });
  }
}

const server = createServer({ keepAliveTimeout: 75_000 });
server.on("request", (request, response) => void answer(request, response));
server.listen(PORT, () => console.log(`worker at port ${server.address().port}, ${BATCH_MS} ms a batch`));
// What runs is answered; then the process ends, because nothing is left to do.
process.once("SIGTERM", () => server.close());
