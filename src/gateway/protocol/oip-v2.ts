/**
 * The Open Inference Protocol (KServe's v2), as Triton, MLServer, OpenVINO and others speak it over HTTP.
 *
 *   POST /v2/models/{model}[/versions/{version}]/infer
 *   {"id"?,"parameters"?,"inputs":[{"name","shape":[B,…],"datatype","data":[…]}…],"outputs"?:[{"name"}…]}
 *   {"model_name","model_version"?,"id"?,"outputs":[{"name","datatype","shape":[B,…],"data":[…]}…]}
 *
 * Each of the B rows is a task. With the binary extension tensors stand as bytes behind the JSON. `oip-client.ts` reads
 * requests, `oip-answer.ts` writes answers, `oip-worker.ts` speaks to workers; `oip-grpc.ts` is the same over gRPC.
 */
import { splitArray } from "../../core/json-split.ts";
import { cutFields, without } from "./fields.ts";
import { kserveError, nameIn } from "./kserve-v1.ts";
import { BYTES_TYPE } from "./oip-body.ts";
import { readInfer } from "./oip-client.ts";
import { inferCall, inferOutputs } from "./oip-worker.ts";
import type { About, AboutRoute, Answer, Protocol } from "./protocol.ts";

const BINARY_EXTENSION = "binary_tensor_data";
/** Not every client says what it sends. */
const TYPES = ["application/json", BYTES_TYPE, "", "application/x-www-form-urlencoded"];
/** What stands behind a worker's base. */
const ENDPOINT = /\/v2\/models\/([^/]+)(\/versions\/[^/]+)?\/infer$/;
/** What asks for one model's state: of the one that is chosen, or of a version. */
const MODEL = ["/v2/models/{model}", "/v2/models/{model}/versions/{version}"];

export const oipV2: Protocol = {
  name: "oip-v2",
  client: {
    infer: MODEL.map((path) => ({ path: `${path}/infer`, types: TYPES, read: readInfer })),
    about: [
      { path: "/v2", tell: serverMetadata },
      { path: "/v2/health/live", open: true, tell: () => truth("live", true) },
      { path: "/v2/health/ready", open: true, tell: (about) => truth("ready", allReady(about)) },
      ...MODEL.flatMap((path): AboutRoute[] => [
        {
          path: `${path}/ready`,
          open: true,
          tell: ({ model, ready }) => model && truth("ready", ready && model.ready),
        },
        { path, tell: atTheWorker, fallback: modelMetadata },
        // Of Triton alone; clients that pad or cut by themselves look there.
        { path: `${path}/config`, tell: atTheWorker },
        { path: `${path}/stats`, tell: atTheWorker },
      ]),
    ],
    fail: kserveError,
  },
  worker: {
    readsBytes: true,
    extension: { path: "/v2", listed: listsBinary },
    basePath: (path) => without(path.replace(ENDPOINT, "")),
    modelOf: (path) => nameIn(ENDPOINT.exec(path)?.[1]),
    call: inferCall,
    outputs: inferOutputs,
  },
};

/** Of the metadata of a server. */
function listsBinary(metadata: string): boolean {
  const listed = splitArray(cutFields(metadata)?.get("extensions") ?? "").elements ?? [];
  return listed.includes(`"${BINARY_EXTENSION}"`);
}

function atTheWorker({ model }: About): "worker" | undefined {
  return model === undefined ? undefined : "worker";
}

function serverMetadata({ version }: About): Answer {
  return { body: JSON.stringify({ name: "ferry", version, extensions: [BINARY_EXTENSION] }) };
}

/** 4xx is their word for no. */
function truth(name: "live" | "ready", yes: boolean): Answer {
  return { status: yes ? 200 : 400, body: JSON.stringify({ [name]: yes }) };
}

/** As the protocol has it: every model, which here means those that speak it. */
function allReady({ models, ready }: About): boolean {
  return ready && models.every((model) => !model.protocols.includes("oip-v2") || model.ready);
}

/** What its tensors are only a worker knows. */
function modelMetadata({ model }: About): Answer {
  const { name } = model!;
  return { body: JSON.stringify({ name, versions: [], platform: "ferry", inputs: [], outputs: [] }) };
}
