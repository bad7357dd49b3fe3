/**
 * RESP2 encoder and parser, on the path of every request.
 *
 * `CommandWriter` appends commands to a slab of SLAB_BYTES that is never reused (the socket may still hold it); a group
 * of commands is one piece, or a few when a slab ends or a Buffer is too large to copy. Such a Buffer goes to the
 * socket as it is: do not change it afterwards.
 *
 * `ReplyParser` takes chunks cut anywhere. A text is a view of its chunk, without a copy, and keeps that chunk (64 KB
 * at most) alive: copy what you keep for long. Only what a chunk's end cuts in two is joined, once, so the cost is
 * linear whatever the cuts. An error inside an array makes the whole reply that error. Integers beyond 2^53 lose
 * digits. RESP3 types are rejected.
 */

export type Arg = string | Buffer | number;
/** Simple strings are Buffers too. */
export type RedisReply = Buffer | number | null | RedisReply[];

/** An error reply. `code` is the first word: NOSCRIPT, MOVED, OOM, ERR … */
export class RedisError extends Error {
  readonly code: string;

  constructor(message: string) {
    super(message);
    this.name = "RedisError";
    const end = message.indexOf(" ");
    this.code = end < 0 ? message : message.slice(0, end);
  }
}

const SLAB_BYTES = 64 * 1024;
/** A larger Buffer is written beside the slab: the copy would cost more than another piece. */
const APART_BYTES = 16 * 1024;
const SHORT_CHARS = 64; // up to this length a loop beats a call into the encoder
const FRAME_BYTES = 16; // "$" or "*", at most ten digits, twice "\r\n"

const CR = 13;
const LF = 10;
const STAR = 42;
const DOLLAR = 36;
const PLUS = 43;
const MINUS = 45;
const COLON = 58;
const ZERO = 48;

export class CommandWriter {
  #slab = Buffer.allocUnsafeSlow(SLAB_BYTES);
  #from = 0;
  #at = 0;
  #pieces: Buffer[] = [];

  add(command: readonly Arg[]): void {
    this.#room(FRAME_BYTES);
    this.#head(STAR, command.length);
    for (const arg of command) {
      if (typeof arg === "string") this.#text(arg);
      else if (typeof arg === "number") this.#text(String(arg));
      else this.#bytes(arg);
    }
  }

  take(): Buffer[] {
    this.#cut();
    const pieces = this.#pieces;
    this.#pieces = [];
    return pieces;
  }

  #text(text: string): void {
    if (text.length <= SHORT_CHARS && this.#ascii(text)) return;
    const length = Buffer.byteLength(text);
    this.#room(length + FRAME_BYTES);
    this.#head(DOLLAR, length);
    this.#at += this.#slab.write(text, this.#at);
    this.#end();
  }

  /** Writes it if it is all ASCII; otherwise writes nothing and returns false. */
  #ascii(text: string): boolean {
    const { length } = text;
    this.#room(length + FRAME_BYTES);
    const start = this.#at;
    this.#head(DOLLAR, length);
    const slab = this.#slab;
    let at = this.#at;
    for (let i = 0; i < length; i++) {
      const char = text.charCodeAt(i);
      if (char > 127) {
        this.#at = start;
        return false;
      }
      slab[at++] = char;
    }
    this.#at = at;
    this.#end();
    return true;
  }

  #bytes(bytes: Buffer): void {
    const apart = bytes.length >= APART_BYTES;
    this.#room((apart ? 0 : bytes.length) + FRAME_BYTES);
    this.#head(DOLLAR, bytes.length);
    if (apart) {
      this.#cut();
      this.#pieces.push(bytes);
    } else {
      this.#slab.set(bytes, this.#at);
      this.#at += bytes.length;
    }
    this.#end();
  }

  #head(mark: number, count: number): void {
    const slab = this.#slab;
    let at = this.#at;
    slab[at++] = mark;
    if (count < 10) slab[at++] = ZERO + count;
    else {
      let unit = 10;
      while (unit * 10 <= count) unit *= 10;
      for (let rest = count; unit >= 1; unit = Math.floor(unit / 10)) {
        const digit = Math.floor(rest / unit);
        slab[at++] = ZERO + digit;
        rest -= digit * unit;
      }
    }
    this.#at = at;
    this.#end();
  }

  #end(): void {
    this.#slab[this.#at++] = CR;
    this.#slab[this.#at++] = LF;
  }

  #cut(): void {
    if (this.#at > this.#from) this.#pieces.push(this.#slab.subarray(this.#from, this.#at));
    this.#from = this.#at;
  }

  #room(bytes: number): void {
    if (this.#at + bytes <= this.#slab.length) return;
    this.#cut();
    this.#slab = Buffer.allocUnsafeSlow(Math.max(SLAB_BYTES, bytes));
    this.#from = this.#at = 0;
  }
}

/** Not RESP2: the connection must be closed. */
export class ProtocolError extends Error {}

/** An array whose items are still arriving. */
interface Frame {
  readonly items: RedisReply[];
  left: number;
  readonly outer: Frame | undefined;
}

const MAX_LINE_BYTES = 64 * 1024;
const MAX_TEXT_BYTES = 512 * 1024 * 1024; // Redis's default `proto-max-bulk-len`

export class ReplyParser {
  readonly #take: (reply: RedisReply | RedisError) => void;
  #frame: Frame | undefined;
  #failure: RedisError | undefined; // the first error inside the array that is arriving
  #line: Buffer | undefined; // start of an incomplete line
  #parts: Buffer[] = []; // of an incomplete text
  #length = 0; // of the whole text
  #missing = 0; // bytes, with "\r\n"
  #at = 0; // where `#number` stopped reading

  constructor(take: (reply: RedisReply | RedisError) => void) {
    this.#take = take;
  }

  feed(chunk: Buffer): void {
    let buffer = chunk;
    let at = 0;
    if (this.#missing > 0) {
      at = this.#more(chunk);
      if (this.#missing > 0) return;
    } else if (this.#line !== undefined) {
      buffer = Buffer.concat([this.#line, chunk]);
      this.#line = undefined;
    }
    while (at < buffer.length) {
      const next = this.#one(buffer, at);
      if (next < 0) return;
      at = next;
    }
  }

  /** Reads the value at `at`; returns where the next one starts, or -1 if it is incomplete. */
  #one(buffer: Buffer, at: number): number {
    const mark = buffer[at];
    if (mark === PLUS || mark === MINUS) return this.#simple(buffer, at, mark);
    if (mark !== DOLLAR && mark !== COLON && mark !== STAR)
      throw new ProtocolError(`a reply starts with byte ${mark}, which is not RESP2`);
    const number = this.#number(buffer, at + 1);
    if (this.#at < 0) return this.#keep(buffer, at);
    if (mark === DOLLAR) return number < 0 ? this.#put(null, this.#at) : this.#bulk(buffer, number);
    if (mark === COLON) return this.#put(number, this.#at);
    if (number < 0) return this.#put(null, this.#at);
    if (number === 0) return this.#put([], this.#at);
    this.#frame = { items: [], left: number, outer: this.#frame };
    return this.#at;
  }

  /** The integer from `at` to the line's end; `#at` is then behind that end, or -1 if incomplete. */
  #number(buffer: Buffer, from: number): number {
    let at = from;
    const negative = buffer[at] === MINUS;
    if (negative) at++;
    let value = 0;
    for (; at < buffer.length; at++) {
      const digit = buffer[at]! - ZERO;
      if (digit >= 0 && digit <= 9) {
        value = value * 10 + digit;
        continue;
      }
      if (buffer[at] !== CR) throw new ProtocolError(`a number holds byte ${buffer[at]}`);
      if (at + 1 === buffer.length) break;
      if (buffer[at + 1] !== LF) throw new ProtocolError("a line ends without a line feed");
      this.#at = at + 2;
      return negative ? -value : value;
    }
    this.#at = -1;
    return 0;
  }

  #simple(buffer: Buffer, at: number, mark: number): number {
    const end = buffer.indexOf("\r\n", at + 1, "latin1");
    if (end < 0) return this.#keep(buffer, at);
    if (mark === PLUS) return this.#put(buffer.subarray(at + 1, end), end + 2);
    const error = new RedisError(buffer.toString("utf8", at + 1, end));
    if (this.#frame !== undefined) {
      this.#failure ??= error;
      return this.#put(null, end + 2);
    }
    this.#take(error);
    return end + 2;
  }

  #bulk(buffer: Buffer, length: number): number {
    if (length > MAX_TEXT_BYTES) throw new ProtocolError(`a text of ${length} bytes is announced`);
    const start = this.#at;
    const end = start + length;
    if (end + 2 <= buffer.length) {
      checkEnd(buffer, end);
      return this.#put(buffer.subarray(start, end), end + 2);
    }
    this.#parts.push(buffer.subarray(start));
    this.#length = length;
    this.#missing = end + 2 - buffer.length;
    return -1;
  }

  /** The next part of a long text; returns how many bytes of the chunk belong to it. */
  #more(chunk: Buffer): number {
    const taken = Math.min(this.#missing, chunk.length);
    this.#parts.push(taken === chunk.length ? chunk : chunk.subarray(0, taken));
    this.#missing -= taken;
    if (this.#missing > 0) return taken;
    const whole = Buffer.concat(this.#parts);
    this.#parts = [];
    checkEnd(whole, this.#length);
    return this.#put(whole.subarray(0, this.#length), taken);
  }

  #keep(buffer: Buffer, at: number): number {
    if (buffer.length - at > MAX_LINE_BYTES) throw new ProtocolError("a line does not end");
    this.#line = buffer.subarray(at);
    return -1;
  }

  /** Stores a value, which may complete the arrays around it. Returns `next`, for its callers. */
  #put(value: RedisReply, next: number): number {
    let whole = value;
    for (let frame = this.#frame; frame !== undefined; frame = frame.outer) {
      frame.items.push(whole);
      if (--frame.left > 0) {
        this.#frame = frame;
        return next;
      }
      whole = frame.items;
    }
    this.#frame = undefined;
    const failure = this.#failure;
    this.#failure = undefined;
    this.#take(failure ?? whole);
    return next;
  }
}

function checkEnd(buffer: Buffer, end: number): void {
  if (buffer[end] !== CR || buffer[end + 1] !== LF) throw new ProtocolError("a text is longer than it said");
}
