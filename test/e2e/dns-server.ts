/**
 * A DNS server on loopback, over UDP and, where an answer is too long for that, over TCP: A and AAAA records of the names that
 * its test gives it. A name that it does not know does not exist (NXDOMAIN); `silent`, it answers nothing at all.
 */
import { createSocket, type Socket as UdpSocket } from "node:dgram";
import { once } from "node:events";
import { type AddressInfo, createServer, isIPv6, type Server, type Socket } from "node:net";

const A = 1;
const AAAA = 28;
const NAME_ERROR = 3;
/** What every resolver takes over UDP. */
const MAX_UDP_BYTES = 512;
const TTL_SECONDS = 1;

export class DnsServer implements AsyncDisposable {
  /** By name, in lower case. */
  readonly names = new Map<string, readonly string[]>();
  silent = false;
  /** Questions so far, and how many of them over TCP. */
  asked = 0;
  askedByTcp = 0;
  readonly #udp: UdpSocket = createSocket("udp4");
  readonly #tcp: Server = createServer((socket) => this.#connected(socket));
  readonly #sockets = new Set<Socket>();

  static async listen(): Promise<DnsServer> {
    const server = new DnsServer();
    // One number for both: whoever has it over TCP may lack it over UDP, so it is tried again.
    for (;;) {
      server.#tcp.listen(0, "127.0.0.1");
      await once(server.#tcp, "listening");
      try {
        server.#udp.bind(server.port, "127.0.0.1");
        await once(server.#udp, "listening");
        break;
      } catch {
        server.#tcp.close();
        await once(server.#tcp, "close");
      }
    }
    server.#udp.on("message", (query, { address, port }) => {
      const answer = server.#answer(query);
      if (answer === undefined) return;
      server.#udp.send(answer.length > MAX_UDP_BYTES ? truncated(query) : answer, port, address);
    });
    return server;
  }

  get port(): number {
    return (this.#tcp.address() as AddressInfo).port;
  }

  get address(): string {
    return `127.0.0.1:${this.port}`;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#udp.close();
    this.#tcp.close();
    for (const socket of this.#sockets) socket.destroy();
    await once(this.#tcp, "close");
  }

  /** Each message after its length, in two bytes. */
  #connected(socket: Socket): void {
    this.#sockets.add(socket);
    socket.once("close", () => this.#sockets.delete(socket));
    socket.on("error", () => {});
    let rest = Buffer.alloc(0);
    socket.on("data", (chunk: Buffer) => {
      rest = Buffer.concat([rest, chunk]);
      while (rest.length >= 2 && rest.length >= 2 + rest.readUInt16BE(0)) {
        const end = 2 + rest.readUInt16BE(0);
        this.askedByTcp++;
        const answer = this.#answer(rest.subarray(2, end));
        rest = rest.subarray(end);
        if (answer === undefined) continue;
        const length = Buffer.alloc(2);
        length.writeUInt16BE(answer.length);
        socket.write(Buffer.concat([length, answer]));
      }
    });
  }

  #answer(query: Buffer): Buffer | undefined {
    this.asked++;
    if (this.silent) return undefined;
    const { name, type, question } = read(query);
    const addresses = this.names.get(name);
    const fitting = (addresses ?? []).filter((each) => type === (isIPv6(each) ? AAAA : A));
    const records = fitting.map((address) => record(type, bytesOf(address)));
    return Buffer.concat([
      head(query, addresses === undefined ? NAME_ERROR : 0, records.length),
      question,
      ...records,
    ]);
  }
}

function read(query: Buffer): { name: string; type: number; question: Buffer } {
  const labels: string[] = [];
  let at = 12;
  for (let length = query[at]!; length > 0; length = query[at]!) {
    labels.push(query.toString("latin1", at + 1, at + 1 + length));
    at += 1 + length;
  }
  const name = labels.join(".").toLowerCase();
  return { name, type: query.readUInt16BE(at + 1), question: query.subarray(12, at + 5) };
}

function head(query: Buffer, code: number, answers: number, cut = false): Buffer {
  const bytes = Buffer.alloc(12);
  query.copy(bytes, 0, 0, 2);
  // An answer, with authority, cut or not, recursion wanted and available.
  bytes.writeUInt16BE(0x8580 | (cut ? 0x0200 : 0) | code, 2);
  bytes.writeUInt16BE(1, 4);
  bytes.writeUInt16BE(answers, 6);
  return bytes;
}

function truncated(query: Buffer): Buffer {
  return Buffer.concat([head(query, 0, 0, true), read(query).question]);
}

/** The name is that of the question. */
function record(type: number, data: Buffer): Buffer {
  const bytes = Buffer.alloc(12);
  bytes.writeUInt16BE(0xc00c, 0);
  bytes.writeUInt16BE(type, 2);
  bytes.writeUInt16BE(1, 4);
  bytes.writeUInt32BE(TTL_SECONDS, 6);
  bytes.writeUInt16BE(data.length, 10);
  return Buffer.concat([bytes, data]);
}

function bytesOf(address: string): Buffer {
  if (!isIPv6(address)) return Buffer.from(address.split(".").map(Number));
  const [before, after = ""] = address.split("::");
  const groups = (text: string | undefined): string[] => (text ?? "").split(":").filter(Boolean);
  const [first, last] = [groups(before), groups(after)];
  const zeros = Array.from({ length: 8 - first.length - last.length }, () => "0");
  const bytes = Buffer.alloc(16);
  [...first, ...zeros, ...last].forEach((group, at) =>
    bytes.writeUInt16BE(Number.parseInt(group, 16), 2 * at),
  );
  return bytes;
}
