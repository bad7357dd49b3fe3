/**
 * The Unix socket between the gateway processes and their core, on virtual time.
 *
 * Each direction is a queue of bytes: what is written arrives in order, cut anywhere into pieces, each a while later; a
 * process that stood still reads all that has come in one piece. A connection ends when it is closed, when a process
 * dies, or when it is cut; then the end of what was on its way may be missing, in the middle of a message.
 *
 * Held to the contract of `Link`: bytes are copied when they leave and not before, so that a buffer which is used again too
 * early is found, and what was read is overwritten after the call.
 */
import type { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import type { Link } from "../../src/engine/remote/channel.ts";
import type { Host } from "./host.ts";
import type { Ledger } from "./ledger.ts";
import type { Dice, LinkFaults } from "./plan.ts";

/** How long a connection that was cut may look well to a process. */
const NOTICED_MS = 20;
const OVERWRITTEN = 0xdb;

interface Listener {
  readonly host: Host;
  accept(link: Link): void;
}

export class CoreSocket {
  readonly time: VirtualClock;
  readonly dice: Dice;
  readonly ledger: Ledger;
  #faults: LinkFaults;
  #listener: Listener | undefined;
  /** By gateway process, its end of its latest connection. */
  readonly #connections = new Map<Host, End>();

  constructor(time: VirtualClock, dice: Dice, faults: LinkFaults, ledger: Ledger) {
    this.time = time;
    this.dice = dice;
    this.ledger = ledger;
    this.#faults = faults;
  }

  listen(host: Host, accept: (link: Link) => void): void {
    this.#listener = { host, accept };
  }

  /** The core takes no more connections. */
  close(): void {
    this.#listener = undefined;
  }

  /** From here on nothing is slow. */
  heal(): void {
    this.#faults = { ...this.#faults, slow: 0 };
  }

  latency(): number {
    const { dice } = this;
    const { latencyMs, slow, slowMs } = this.#faults;
    const usual = 0.02 + dice.exponential(latencyMs);
    if (!dice.chance(slow)) return usual;
    this.ledger.count("link slow");
    return usual + dice.share() * slowMs;
  }

  /** Bytes of the next piece of so many. */
  piece(length: number): number {
    return this.dice.chance(this.#faults.pieces) ? this.dice.between(1, length) : length;
  }

  /** A core that stands still is connected to all the same: the kernel accepts. */
  async connect(host: Host): Promise<Link> {
    await new Promise<void>((resolve) => host.deliver(this.latency(), resolve));
    const listener = this.#listener;
    if (listener?.host.alive !== true) throw new Error("nothing listens there (ECONNREFUSED)");
    const [gateway, core] = [new End(host, this), new End(listener.host, this)];
    gateway.meet(core);
    this.#connections.set(host, gateway);
    listener.host.deliver(this.latency(), () => listener.accept(core));
    return gateway;
  }

  /** Cuts the connection of a gateway once so many more bytes have left it, or have left the core for it. */
  cut(gateway: Host, afterBytes: number, atCore: boolean): void {
    this.#connections.get(gateway)?.cutAfter(afterBytes, atCore);
  }
}

interface Arriving {
  readonly at: number;
  /** Undefined: the end. */
  readonly bytes: Buffer | undefined;
}

class End implements Link {
  readonly #host: Host;
  readonly #socket: CoreSocket;
  #peer!: End;
  /** Written and not sent yet, in order; undefined: the end. */
  #leaving: ([bytes: Buffer, left: () => void] | undefined)[] = [];
  /** Sent by the peer and not read yet. */
  #arriving: Arriving[] = [];
  #lastAt = 0;
  #cutAfter = Infinity;
  /** Nothing more leaves. */
  #mute = false;
  #over = false;
  #data: ((bytes: Buffer) => void) | undefined;
  #closed: ((why: string) => void) | undefined;

  constructor(host: Host, socket: CoreSocket) {
    this.#host = host;
    this.#socket = socket;
  }

  meet(peer: End): void {
    this.#peer = peer;
    peer.#peer = this;
    for (const end of [this, peer]) end.#host.onDeath.add(end.#died);
  }

  write(bytes: Buffer, left: () => void): void {
    if (this.#mute || !this.#host.alive) return;
    this.#leaving.push([bytes, left]);
    this.#leaveLater();
  }

  on(data: (bytes: Buffer) => void, closed: (why: string) => void): void {
    this.#data = data;
    this.#closed = closed;
    this.#host.deliver(0, () => this.#read());
  }

  end(): void {
    if (this.#mute || !this.#host.alive) return;
    this.#leaving.push(undefined);
    this.#leaveLater();
  }

  destroy(): void {
    if (this.#over || !this.#host.alive) return;
    this.#hangUp();
    this.#over = true;
    this.#host.deliver(0, () => this.#closed?.("it was closed here"));
  }

  cutAfter(bytes: number, atPeer: boolean): void {
    (atPeer ? this.#peer : this).#cutAfter = bytes;
  }

  readonly #died = (): void => {
    // The kernel sends what it was given, or resets the connection: then the other reads no further.
    if (this.#socket.dice.chance(0.4)) this.#peer.#tear();
    this.#hangUp();
  };

  #leaveLater(): void {
    const { dice } = this.#socket;
    this.#host.deliver(dice.chance(0.2) ? dice.share() : 0, () => this.#leave());
  }

  #leave(): void {
    const next = this.#leaving.shift();
    if (this.#mute) return;
    if (next === undefined) return this.#hangUp();
    const [bytes, left] = next;
    const copy = Buffer.from(bytes);
    left();
    if (copy.length < this.#cutAfter) {
      this.#cutAfter -= copy.length;
      return this.#send(copy);
    }
    this.#send(copy.subarray(0, this.#cutAfter));
    this.#socket.ledger.count("fault: link cut");
    this.#socket.ledger.say(this.#host.name, "connection cut");
    this.#socket.ledger.trouble("away")();
    this.#peer.#tear();
    this.#tear();
    for (const end of [this, this.#peer]) {
      end.#hangUp();
      end.#host.deliver(this.#socket.dice.share() * NOTICED_MS, () => end.#finish("it was cut"));
    }
  }

  #send(bytes: Buffer): void {
    for (let at = 0; at < bytes.length;) {
      const to = at + this.#socket.piece(bytes.length - at);
      this.#peer.#expect(bytes.subarray(at, to));
      at = to;
    }
  }

  /** Nothing more comes from here; the other end is told after what is on its way. */
  #hangUp(): void {
    if (this.#mute) return;
    this.#mute = true;
    this.#host.onDeath.delete(this.#died);
    this.#peer.#expect(undefined);
  }

  #expect(bytes: Buffer | undefined): void {
    const { time } = this.#socket;
    const at = (this.#lastAt = Math.max(this.#lastAt, time.now() + this.#socket.latency()));
    this.#arriving.push({ at, bytes });
    this.#host.deliver(at - time.now(), () => this.#read());
  }

  /** Loses the end of what is on its way to here. */
  #tear(): void {
    const { dice } = this.#socket;
    if (this.#arriving.length === 0) return;
    const kept = this.#arriving.slice(0, dice.upTo(this.#arriving.length));
    const last = this.#arriving[kept.length]!;
    if (last.bytes !== undefined)
      kept.push({ at: last.at, bytes: last.bytes.subarray(0, dice.upTo(last.bytes.length)) });
    this.#arriving = kept;
  }

  #read(): void {
    if (this.#over || this.#data === undefined) return;
    const now = this.#socket.time.now();
    const come = this.#arriving.findIndex(({ at }) => at > now);
    const arrived = this.#arriving.splice(0, come < 0 ? this.#arriving.length : come);
    const bytes = Buffer.concat(arrived.flatMap((each) => each.bytes ?? []));
    if (bytes.length > 0) {
      this.#data(bytes);
      bytes.fill(OVERWRITTEN);
    }
    if (arrived.every((each) => each.bytes !== undefined)) return;
    // Neither side keeps a connection that is open in one direction.
    this.#hangUp();
    this.#finish("the other end closed it");
  }

  #finish(why: string): void {
    // One that is not accepted yet reads of its end later.
    if (this.#over || this.#closed === undefined) return;
    this.#over = true;
    this.#closed(why);
  }
}
