import assert from "node:assert/strict";
import fs from "node:fs";
import { after } from "node:test";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { MemoryEngine } from "../../src/engine/memory/engine.ts";
import { openJournal } from "../../src/engine/memory/journal.ts";
import { RecordKeeper } from "../../src/engine/memory/saved.ts";
import { Events } from "../../src/observe/events.ts";
import { engineContract } from "../contract/engine.ts";
import type { EngineOptions, OpenEngine, Opened } from "../contract/engine-stage.ts";
import { Halves, home, newPath } from "./remote-stage.ts";

after(() => fs.rmSync(home, { recursive: true, force: true }));

const openBare: OpenEngine = async (options) => {
  const [clock, events] = [new VirtualClock(), new Events()];
  const halves = new Halves(clock, false);
  const engine = await halves.start(new MemoryEngine(() => options, clock, events), options);
  return { engine, clock, events, refresh: halves.refresh, takesInLater: true };
};

const openOnDisk: OpenEngine = (options) => {
  const clock = new VirtualClock();
  return openKept(newPath(), new Halves(clock, true), options, clock, new Events());
};

async function openKept(
  dir: string,
  halves: Halves,
  options: EngineOptions,
  clock: VirtualClock,
  events: Events,
): Promise<Opened> {
  const { journal, records } = await openJournal(dir, (why) => assert.fail(why?.message));
  const keeper = new RecordKeeper(journal, records);
  const core = new MemoryEngine(() => options, clock, events, { keeper });
  const engine = await halves.start(core, options);
  const reopen = async (more?: Partial<EngineOptions>): Promise<Opened> => {
    await halves.stopCore();
    return openKept(dir, halves, { ...options, ...more }, clock, events);
  };
  return { engine, clock, events, refresh: halves.refresh, takesInLater: true, reopen };
}

engineContract("the remote engine", openBare, { runs: 60 });
engineContract("the remote engine of a core with a journal", openOnDisk, { runs: 10 });
