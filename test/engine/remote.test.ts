import assert from "node:assert/strict";
import fs from "node:fs";
import { once } from "node:events";
import { connect } from "node:net";
import { after, test } from "node:test";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { MemoryEngine } from "../../src/engine/memory/engine.ts";
import { openJournal } from "../../src/engine/memory/journal.ts";
import { connectLink } from "../../src/engine/remote/channel.ts";
import { RecordKeeper } from "../../src/engine/memory/saved.ts";
import { Events } from "../../src/observe/events.ts";
import { engineContract } from "../contract/engine.ts";
import { type EngineOptions, type OpenEngine, type Opened, PLAIN } from "../contract/engine-stage.ts";

import { Halves, home, makeRemote, makeServer, newPath } from "./remote-stage.ts";

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

test("a core ends although a client of its socket reads nothing and a gateway never said hello", async () => {
  const clock = new VirtualClock();
  const core = new MemoryEngine(() => PLAIN, clock, new Events());
  const server = makeServer(core, clock);
  const path = newPath();
  await server.listen(path);
  assert.equal(fs.statSync(path).mode & 0o777, 0o600);
  const socket = connect({ path, allowHalfOpen: true });
  await once(socket, "connect");
  socket.pause();
  const remote = makeRemote(
    () => connectLink(path),
    clock,
    () => PLAIN,
  );
  await remote.open();
  await remote.close();
  const closed = server.close();
  await clock.run(clock.now() + 1001);
  await closed;
  socket.destroy();
});

test("a socket's path that is too long for the system is named", async () => {
  const clock = new VirtualClock();
  const server = makeServer(new MemoryEngine(() => PLAIN, clock, new Events()), clock);
  await assert.rejects(
    server.listen(`/${"x".repeat(200)}`),
    /longer than 107 bytes: \/x+; choose a shorter one/,
  );
  await server.close();
});
