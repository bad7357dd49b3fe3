/** `ferry recover`: replaces a damaged journal with its readable part. The damaged file is kept beside it. */
import { count, plural } from "./terminal/banner.ts";
import { recoverJournal } from "../engine/memory/journal-recover.ts";
import { printable } from "./terminal/terminal.ts";
import { expectNoWords, Failure, type Call, type Command, type Console } from "./command.ts";
import { chooseConfig, configFlag } from "./config-file.ts";

export const recover: Command = {
  summary: "save what is readable of a damaged journal; Ferry must not be running",
  usage: "recover [-c FILE] [--json]",
  examples: [
    { line: "ferry recover -c ferry.yaml", doc: "the journal in that file's engine.dataDir" },
    { line: "ferry recover -c ferry.yaml --json", doc: "one object, for scripts" },
  ],
  flags: { config: configFlag, json: { type: "boolean", doc: "one JSON object on stdout" } },

  async run(call: Call, console: Console): Promise<number> {
    expectNoWords(call);
    const chosen = chooseConfig(call, console, "nothing was changed");
    if (chosen === undefined) return 1;
    const { engine } = chosen.config;
    if (engine.kind !== "memory") throw new Failure("engine.kind is redis, so there is no journal here");
    const { dataDir } = engine;
    if (dataDir === undefined) throw new Failure("engine.dataDir is not set, so there is no journal");
    const { file, records, lost, keptAs } = recoverJournal(dataDir);
    if (call.is("json")) {
      console.out(`${JSON.stringify({ file, records, lost: lost ?? null, keptAs: keptAs ?? null })}\n`);
    } else if (keptAs === undefined) {
      console.out(`${printable(file)} is not damaged: ${plural(records, "record")}, nothing was changed\n`);
    } else {
      const missing =
        lost === undefined ? "an unknown number is" : `${count(lost)} ${lost === 1 ? "is" : "are"}`;
      console.out(`${printable(file)}: ${plural(records, "record")} saved, ${missing} lost\n`);
      console.out(`the damaged file is kept as ${printable(keptAs)}\n`);
    }
    return 0;
  },
};
