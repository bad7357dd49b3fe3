/**
 * A connection between a gateway process and the core process. What either side writes in one turn of the event loop
 * leaves in one write at its end; complete messages are handled as they arrive.
 */
import { connect as connectSocket, type Socket } from "node:net";
import { LENGTH_BYTES, MAX_MESSAGE_BYTES, WireError, WireReader, WireWriter } from "./wire.ts";

/** A stream of bytes in both directions. */
export interface Link {
  /** Calls `left` once the bytes are with the operating system and may be overwritten; in order. */
  write(bytes: Buffer, left: () => void): void;
  /** `data`: its bytes are valid only during the call. `closed`: once, after which nothing is called. */
  on(data: (bytes: Buffer) => void, closed: (why: string) => void): void;
  /** Closes it once everything is written. */
  end(): void;
  destroy(): void;
}

const READ_BYTES = 256 << 10;

/** Connects to the core process; rejects if nothing listens there. */
export function connectLink(path: string): Promise<Link> {
  const { promise, resolve, reject } = Promise.withResolvers<Link>();
  let data: (bytes: Buffer) => void = () => {};
  // One buffer for all reads.
  const callback = (bytes: number, buffer: Uint8Array): boolean => {
    data(Buffer.from(buffer.buffer, buffer.byteOffset, bytes));
    return true;
  };
  const socket = connectSocket({ path, onread: { buffer: Buffer.allocUnsafeSlow(READ_BYTES), callback } });
  socket.once("error", reject);
  socket.once("connect", () => {
    socket.off("error", reject);
    resolve(linkOf(socket, (heard) => (data = heard)));
  });
  return promise;
}

export function socketLink(socket: Socket): Link {
  return linkOf(socket, (data) => socket.on("data", data));
}

function linkOf(socket: Socket, onData: (data: (bytes: Buffer) => void) => void): Link {
  let why = "it was closed";
  socket.on("error", (error) => (why = error.message));
  return {
    write: (bytes, left) => void socket.write(bytes, left),
    on: (data, closed) => {
      onData(data);
      socket.once("close", () => closed(why));
    },
    end: () => void socket.end(),
    destroy: () => void socket.destroy(),
  };
}

export class Channel {
  readonly out = new WireWriter();
  readonly in = new WireReader();
  readonly #link: Link;
  readonly #received: (from: WireReader) => void;
  readonly #closed: (why: string, failed: boolean) => void;
  #part = Buffer.alloc(0); // the beginning of a message whose rest has not arrived
  #partBytes = 0;
  #leaving = 0; // bytes on their way to the operating system
  #flushes = false;
  #ended = false;

  /**
   * `received`: once per message; throws a WireError if it cannot be read. `closed`: once. `failed`: by this side, on
   * account of the other.
   */
  constructor(
    link: Link,
    received: (from: WireReader) => void,
    closed: (why: string, failed: boolean) => void,
  ) {
    this.#link = link;
    this.#received = received;
    this.#closed = closed;
    link.on(
      (bytes) => this.#arrived(bytes),
      (why) => this.#end(why, false),
    );
  }

  /** Bytes that wait to be written: a measure of how far the other process is behind. */
  get waiting(): number {
    return this.out.size + this.#leaving;
  }

  /** Begins a message, which leaves at the end of this turn. */
  message(kind: number): WireWriter {
    if (!this.#flushes && !this.#ended) {
      this.#flushes = true;
      setImmediate(this.#flush);
    }
    return this.out.begin(kind);
  }

  /** Closes it once everything is written. */
  end(): void {
    this.#flush();
    this.#link.end();
  }

  /** Closes it now. */
  fail(why: string): void {
    if (this.#ended) return;
    this.#link.destroy();
    this.#end(why, true);
  }

  #end(why: string, failed: boolean): void {
    if (this.#ended) return;
    this.#ended = true;
    this.#closed(why, failed);
  }

  readonly #flush = (): void => {
    this.#flushes = false;
    if (this.#ended || this.out.size === 0) return;
    for (const bytes of this.out.take()) {
      const { length } = bytes;
      this.#leaving += length;
      this.#link.write(bytes, () => {
        this.#leaving -= length;
        this.out.left();
      });
    }
  };

  #arrived(bytes: Buffer): void {
    if (this.#ended) return;
    try {
      let at = this.#partBytes === 0 ? 0 : this.#complete(bytes);
      this.in.over(bytes);
      while (at + LENGTH_BYTES <= bytes.length) {
        const end = at + LENGTH_BYTES + lengthAt(bytes, at);
        if (end > bytes.length) break;
        this.#handle(at + LENGTH_BYTES, end);
        at = end;
      }
      if (at < bytes.length) this.#keep(bytes, at, bytes.length);
    } catch (error) {
      if (!(error instanceof WireError)) throw error;
      this.fail(error.message);
    }
  }

  #handle(from: number, to: number): void {
    if (this.#ended) return;
    this.in.message(from, to);
    this.#received(this.in);
    this.in.done();
  }

  /** Completes the message that has begun; returns where the next one begins. */
  #complete(bytes: Buffer): number {
    let at = 0;
    for (;;) {
      const known = this.#partBytes >= LENGTH_BYTES;
      const needed = known ? LENGTH_BYTES + lengthAt(this.#part, 0) : LENGTH_BYTES;
      const taken = Math.min(needed - this.#partBytes, bytes.length - at);
      this.#keep(bytes, at, at + taken);
      at += taken;
      if (this.#partBytes < needed) return at;
      if (!known) continue;
      this.in.over(this.#part);
      this.#partBytes = 0;
      this.#handle(LENGTH_BYTES, needed);
      if (this.#part.length > READ_BYTES) this.#part = Buffer.alloc(0);
      return at;
    }
  }

  /** Grows with what arrives, not with what a length announces. */
  #keep(bytes: Buffer, from: number, to: number): void {
    const size = this.#partBytes + to - from;
    if (size > this.#part.length) {
      const larger = Buffer.allocUnsafeSlow(Math.max(4096, 2 * size));
      larger.set(this.#part.subarray(0, this.#partBytes));
      this.#part = larger;
    }
    this.#part.set(bytes.subarray(from, to), this.#partBytes);
    this.#partBytes = size;
  }
}

function lengthAt(bytes: Buffer, at: number): number {
  const length = bytes.readUInt32LE(at);
  if (length === 0 || length > MAX_MESSAGE_BYTES) throw new WireError(`a message has the length ${length}`);
  return length;
}
