/**
 * Answers that may be large, written a text at a time: who sends them decides whether everybody else is served between two.
 */
import type { Json } from "../../core/task.ts";
import type { Answer, Drafts } from "./protocol.ts";

/** Both ways of an answer, from the second. */
export function inPieces(pieces: NonNullable<Drafts["pieces"]>): Pick<Drafts, "render" | "pieces"> {
  const render = (...asked: Parameters<typeof pieces>): Answer => {
    const { headers, texts } = pieces(...asked);
    return { ...(headers && { headers }), body: [...texts].join("") };
  };
  return { render, pieces };
}

/** Of a list: a comma before each text but the first. */
export function* listed<T>(
  elements: Iterable<T>,
  text: (element: T, index: number) => Json,
): Generator<Json, void> {
  let index = 0;
  for (const element of elements) {
    yield (index === 0 ? "" : ",") + text(element, index);
    index++;
  }
}
