import { version } from "../app/version.ts";
import { expectNoWords, type Call, type Command, type Console } from "./command.ts";

export const versionCommand: Command = {
  summary: "print the version",
  usage: "version [--json]",
  examples: [
    { line: "ferry version", doc: "Ferry's version" },
    { line: "ferry version --json", doc: "Ferry's and Node's, for bug reports" },
  ],
  flags: { json: { type: "boolean", doc: "one JSON object on stdout" } },

  async run(call: Call, console: Console): Promise<number> {
    expectNoWords(call);
    const facts = { version: version(), node: process.versions.node };
    console.out(call.is("json") ? `${JSON.stringify(facts)}\n` : `ferry ${facts.version}\n`);
    return 0;
  },
};
