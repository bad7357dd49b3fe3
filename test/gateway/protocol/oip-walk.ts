/** The steps of a ModelInfer through Ferry, each with a message of the real library at its end. */
import assert from "node:assert/strict";
import {
  answerOf,
  callOf,
  draftsOf,
  type InferDrafts,
  outputsOf,
} from "../../../src/gateway/protocol/oip-grpc.ts";
import { rawFromJson } from "../../../src/gateway/protocol/oip-tensors.ts";
import {
  type InferRequest,
  type InferResponse,
  readRequest,
  readResponse,
  requestBytes,
  responseBytes,
} from "./oip-service.ts";

export function drafted(request: InferRequest): InferDrafts {
  const drafts = draftsOf(requestBytes(request));
  assert.ok(drafts.flaw === undefined, String(drafts.flaw));
  return drafts;
}

export function refused(request: InferRequest): string {
  const { flaw } = draftsOf(requestBytes(request));
  assert.ok(flaw !== undefined);
  assert.match(flaw, /^[^\n]{1,300}$/);
  return flaw;
}

export function called(drafts: InferDrafts, inputs = drafts.inputs): InferRequest {
  const call = callOf({ id: "batch-1", parameters: drafts.parameters, inputs }, "upstream", "");
  assert.ok(call.flaw === undefined, String(call.flaw));
  return readRequest(Buffer.concat(call.parts));
}

export function answered(drafts: InferDrafts, outputs: readonly string[]): InferResponse {
  const answer = answerOf(drafts, outputs);
  assert.ok(answer.flaw === undefined, String(answer.flaw));
  return readResponse(Buffer.concat(answer.parts));
}

export function outputs(response: InferResponse, rows: number): readonly string[] {
  const read = outputsOf(responseBytes(response), rows);
  assert.ok(read.flaw === undefined, String(read.flaw));
  return read.outputs;
}

export const floats = (...values: number[]): Buffer => rawFromJson(JSON.stringify(values), "FP32");
export const pair: InferRequest = {
  model_name: "m",
  id: "mine",
  inputs: [
    { name: "x", datatype: "FP32", shape: [2, 3] },
    { name: "ids", datatype: "INT64", shape: [2] },
  ],
  raw_input_contents: [floats(1, 2, 3, 4, 5, 6), rawFromJson("[7,9223372036854775807]", "INT64")],
};
