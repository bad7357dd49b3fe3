/**
 * Explains why a listener could not be opened; for a port in use, which process holds it: /proc/net/tcp gives the inode
 * of the listening socket, and a /proc/PID/fd links to `socket:[inode]`. Best effort: other systems, users and
 * containers hide it, and the message then names no process.
 */
import { readdirSync, readFileSync, readlinkSync } from "node:fs";
import { basename } from "node:path";
import type { Address, Config } from "./config/config.ts";
import { printable } from "../cli/terminal/terminal.ts";

export interface Holder {
  readonly pid: number;
  readonly command: string;
}

/** One line for an Error at the start; its message unless it is about a port. */
export function explainStart(error: unknown, config: Config): string {
  const failure = error instanceof Error ? error : new Error(String(error));
  const cause = listenError(failure) ?? listenError(failure.cause);
  if (cause?.port === undefined) return printable(failure.message);
  const { listen, grpc, admin } = config;
  const [setting, { host }] =
    cause.port === listen.port
      ? (["listen", listen] as const)
      : cause.port === grpc.listen?.port
        ? (["grpc.listen", grpc.listen] as const)
        : (["admin.listen", admin.listen] as const);
  const start = `${setting} ${formatAddress({ host, port: cause.port })}`;
  if (cause.code === "EACCES") return `${start}: ports below 1024 need extra rights; choose a higher one`;
  if (cause.code === "EADDRNOTAVAIL") return `${start}: this machine has no such address; change ${setting}`;
  const holder = portHolder(cause.port);
  const by = holder === undefined ? "" : ` by pid ${holder.pid} (${holder.command})`;
  return `${start}: already in use${by}; stop it or change ${setting}`;
}

/** Ours, not that of a connection to Redis or a worker, which names a remote port. */
interface ListenError extends NodeJS.ErrnoException {
  readonly port?: number;
}

function listenError(error: unknown): ListenError | undefined {
  if (!(error instanceof Error)) return undefined;
  const { code, syscall } = error as ListenError;
  if (syscall === "connect") return undefined;
  return code === "EADDRINUSE" || code === "EACCES" || code === "EADDRNOTAVAIL" ? error : undefined;
}

export function formatAddress({ host, port }: Address): string {
  return host.includes(":") ? `[${host}]:${port}` : `${host}:${port}`;
}

export function portHolder(port: number): Holder | undefined {
  const sockets = new Set(
    ["/proc/net/tcp", "/proc/net/tcp6"].flatMap((table) => listeningInodes(table, port)),
  );
  if (sockets.size === 0) return undefined;
  for (const pid of list("/proc").filter((name) => /^\d+$/.test(name))) {
    const links = list(`/proc/${pid}/fd`).map((fd) => link(`/proc/${pid}/fd/${fd}`));
    if (links.some((target) => sockets.has(target))) return { pid: Number(pid), command: commandOf(pid) };
  }
  return undefined;
}

/** As the fd links name them: `socket:[12345]`. */
function listeningInodes(table: string, port: number): string[] {
  const wanted = `:${port.toString(16).toUpperCase().padStart(4, "0")}`;
  const rows = read(table).split("\n").slice(1);
  const listening = rows.map((row) => row.trim().split(/\s+/)).filter((row) => row[3] === "0A");
  return listening.filter((row) => row[1]?.endsWith(wanted)).map((row) => `socket:[${row[9]}]`);
}

function commandOf(pid: string): string {
  const program = basename(read(`/proc/${pid}/cmdline`).split("\0", 1)[0] ?? "");
  return printable(program === "" ? read(`/proc/${pid}/comm`).trim() : program);
}

function read(file: string): string {
  try {
    return readFileSync(file, "latin1");
  } catch {
    return "";
  }
}

function list(folder: string): string[] {
  try {
    return readdirSync(folder);
  } catch {
    return [];
  }
}

function link(path: string): string {
  try {
    return readlinkSync(path);
  } catch {
    return "";
  }
}
