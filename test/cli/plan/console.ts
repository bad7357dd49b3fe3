/** A command in this process, with what it said. */
import { type Command, Failure, parseCall, UsageError } from "../../../src/cli/command.ts";

export interface Said {
  readonly code: number;
  readonly out: string;
  readonly err: string;
}

/** As `ferry COMMAND …` would, but here. */
export async function call(command: Command, line: string | readonly string[]): Promise<Said> {
  let [out, err] = ["", ""];
  const args = typeof line === "string" ? line.split(" ") : line;
  const console = {
    out: (text: string) => void (out += text),
    err: (text: string) => void (err += text),
    env: {},
    outIsTTY: false,
    errIsTTY: false,
  };
  try {
    const code = await command.run(parseCall(command.flags, args), console);
    return { code, out, err };
  } catch (error) {
    if (error instanceof UsageError) return { code: 2, out, err: err + error.message };
    if (error instanceof Failure) return { code: 1, out, err: err + error.message };
    throw error;
  }
}
