/** What both ways of the Open Inference Protocol over gRPC end in: a message, or what was wrong, as a value. */
import { TensorFlaw } from "./oip-tensors.ts";
import { ProtoFlaw } from "./protobuf.ts";

/** What was wrong, in words for whoever sent it. */
export interface Flawed {
  readonly flaw: string;
}

/** A message of protobuf. */
export interface Encoded {
  /** To be sent one behind the other. */
  readonly parts: readonly Buffer[];
  readonly flaw?: never;
}

/** Turns flaws, which are expected, into values; anything else is a bug and goes on. */
export function flawless<T>(read: () => T): T | Flawed {
  try {
    return read();
  } catch (error) {
    if (error instanceof TensorFlaw || error instanceof ProtoFlaw) return { flaw: error.message };
    throw error;
  }
}
