import { errors, type ErrorCode } from "../core/errors.ts";
import type { Routes } from "./server.ts";

const string = { type: "string" };
const number = { type: "number" };
const anything = {};
const encoding = {
  enum: ["base64", "json"],
  default: "base64",
  description: "how an output that is a tensor is shown; no matter for others",
};
const taskId = { name: "task_id", in: "path", required: true, schema: string };

function ref(name: string): object {
  return { $ref: `#/components/schemas/${name}` };
}

function json(schema: object): object {
  return { "application/json": { schema } };
}

function orBytes(description: string, schema: object): object {
  const bytes = { "application/octet-stream": { schema: { type: "string", format: "binary" } } };
  const headers = {
    ...batchHeaders,
    "x-ferry-dtype": { schema: string },
    "x-ferry-shape": { schema: string },
  };
  return { description, content: { ...json(schema), ...bytes }, headers };
}

function answer(description: string, schema: object, headers?: object): object {
  return { description, content: json(schema), ...(headers && { headers }) };
}

function failures(...codes: ErrorCode[]): Record<string, object> {
  const byStatus = Map.groupBy(codes, (code) => String(errors[code].status));
  return Object.fromEntries(
    [...byStatus].map(([status, list]) => [status, answer(list.join(" or "), ref("Error"))]),
  );
}

const taking = failures(
  "INVALID_REQUEST",
  "NOT_FOUND",
  "NOT_ACCEPTABLE",
  "REQUEST_TIMEOUT",
  "PAYLOAD_TOO_LARGE",
  "UNSUPPORTED_MEDIA_TYPE",
  "IDEMPOTENCY_CONFLICT",
  "INPUT_REJECTED",
  "RATE_LIMITED",
  "INFERENCE_FAILED",
  "SERVICE_OVERLOADED",
  "DEADLINE_EXCEEDED",
);

const batchHeaders = {
  "x-ferry-batch-id": { schema: string },
  "x-ferry-batch-size": { schema: number },
  "x-ferry-queue-ms": { schema: number },
};

const preferences = [
  {
    name: "Accept",
    in: "header",
    schema: string,
    description: "application/octet-stream: the bytes alone of an output that is a tensor or bytes",
  },
  { name: "Prefer", in: "header", schema: string, description: "respond-async, or wait=SECONDS" },
  { name: "Idempotency-Key", in: "header", schema: { type: "string", maxLength: 255 } },
  {
    name: "x-ferry-explain",
    in: "header",
    schema: string,
    description: "1: say why the batch left when it did",
  },
];

const metadata = {
  type: "object",
  properties: {
    model: string,
    latency_ms: number,
    queue_ms: number,
    batch_size: number,
    cached: { type: "boolean" },
    why: string,
  },
};

/** Present beside a base64 output; the last two for tensors only. */
const tensor = {
  encoding: { const: "base64" },
  dtype: string,
  shape: { type: "array", items: { type: "integer" } },
};

const schemas = {
  Request: {
    type: "object",
    required: ["input"],
    additionalProperties: false,
    properties: {
      input: anything,
      model: string,
      parameters: { type: "object" },
      client_id: string,
      encoding,
    },
  },
  Success: {
    type: "object",
    properties: {
      request_id: string,
      task_id: string,
      status: { const: "SUCCESS" },
      output: anything,
      ...tensor,
      metadata,
    },
  },
  Pending: {
    type: "object",
    properties: { request_id: string, task_id: string, status: { const: "PENDING" } },
  },
  Result: {
    type: "object",
    properties: {
      task_id: string,
      status: { enum: ["PENDING", "SUCCESS", "FAILED"] },
      output: anything,
      ...tensor,
      metadata,
      error: string,
      message: string,
    },
  },
  Error: {
    type: "object",
    required: ["error", "message", "request_id"],
    properties: {
      error: { enum: Object.keys(errors) },
      message: string,
      request_id: string,
      retry_after_ms: number,
    },
  },
};

const document = {
  openapi: "3.1.0",
  info: { title: "Ferry", version: "0.1.0", license: { name: "Apache-2.0" } },
  paths: {
    "/v1/inference": {
      post: {
        summary: "Run one input; batched with others on the way",
        parameters: preferences,
        requestBody: { required: true, content: json(ref("Request")) },
        responses: {
          "200": orBytes("done", ref("Success")),
          "202": answer("accepted; poll Location", ref("Pending"), { location: { schema: string } }),
          ...taking,
        },
      },
    },
    "/api/inference": {
      post: {
        summary: "The minimal contract: a string in, its output out",
        requestBody: {
          required: true,
          content: json({ type: "object", required: ["input"], properties: { input: string, encoding } }),
        },
        responses: {
          "200": orBytes("done", {
            type: "object",
            properties: { output: anything, ...tensor, request_id: string, latency_ms: number },
          }),
          ...taking,
        },
      },
    },
    "/v1/result/{task_id}": {
      parameters: [taskId],
      get: {
        summary: "A task's state and outcome",
        parameters: [
          { name: "wait", in: "query", schema: number, description: "seconds to wait for the outcome" },
          { name: "encoding", in: "query", schema: encoding },
        ],
        responses: {
          "200": orBytes("its state", ref("Result")),
          ...failures("INVALID_REQUEST", "NOT_FOUND", "NOT_ACCEPTABLE"),
        },
      },
      delete: {
        summary: "Cancel a queued task, or forget a finished one",
        responses: {
          "200": answer("cancelled", ref("Result")),
          "204": { description: "forgotten" },
          ...failures("NOT_FOUND", "NOT_CANCELLABLE"),
        },
      },
    },
    "/healthz": { get: { summary: "The process lives", responses: { "200": { description: "ok" } } } },
    "/readyz": {
      get: {
        summary: "The process wants requests",
        responses: {
          "200": { description: "ready" },
          "503": { description: "draining, or tasks cannot be stored" },
        },
      },
    },
  },
  components: { schemas },
};

const open = new Set(["/healthz", "/readyz"]);

function secured(): object {
  const refusals = failures("UNAUTHENTICATED", "FORBIDDEN");
  const paths = Object.entries(document.paths).map(([path, item]) => {
    const operations = Object.entries(item).map(([name, operation]: [string, object]) => {
      if (!("responses" in operation)) return [name, operation];
      if (open.has(path)) return [name, { ...operation, security: [] }];
      return [name, { ...operation, responses: { ...(operation.responses as object), ...refusals } }];
    });
    return [path, Object.fromEntries(operations)];
  });
  const securitySchemes = {
    bearer: { type: "http", scheme: "bearer", description: "an API key or a JSON Web Token" },
    apiKey: { type: "apiKey", in: "header", name: "x-api-key" },
  };
  return {
    ...document,
    paths: Object.fromEntries(paths) as object,
    security: [{ bearer: [] }, { apiKey: [] }],
    components: { schemas, securitySchemes },
  };
}

export function openapiRoutes(authRequired = false): Routes {
  const body = JSON.stringify(authRequired ? secured() : document);
  return { "/openapi.json": { GET: (exchange) => exchange.send(200, body) } };
}
