/**
 * Single key presses from a terminal: raw mode while listening, the previous mode restored on every exit path. In raw
 * mode the terminal sends no signals. Ctrl-C is passed on as a key; Ctrl-Z and Ctrl-\ do what the terminal would have
 * done. Escape sequences are dropped. A background process must not touch the terminal: changing its mode or reading
 * from it would stop the process. So nothing is done there, and after Ctrl-Z only once the shell has resumed it in the
 * foreground.
 */
import { spawnSync } from "node:child_process";
import { readFileSync } from "node:fs";

type ReturnSignal = "SIGCONT" | "SIGHUP" | "SIGQUIT";

export interface TerminalProcess {
  readonly stdin: {
    setRawMode(raw: boolean): unknown;
    setEncoding(encoding: "utf8"): unknown;
    resume(): unknown;
    pause(): unknown;
    on(name: "data", listener: (text: string) => void): unknown;
    on(name: "error", listener: () => void): unknown;
    off(name: "data", listener: (text: string) => void): unknown;
  };
  readonly pid: number;
  on(name: "exit" | ReturnSignal, listener: () => void): unknown;
  off(name: "exit" | ReturnSignal, listener: () => void): unknown;
  kill(pid: number, signal: NodeJS.Signals): unknown;
}

const CTRL_Z = "\u001a";
const CTRL_BACKSLASH = "\u001c";
const ESCAPE = "\u001b";
/** Signals the whole process group, as the terminal does: `npm start` is part of it. */
const GROUP = 0;

/** Passes every key to `pressed` until the returned function is called; undefined in the background. */
export function listenToKeys(
  process: TerminalProcess,
  pressed: (key: string) => void,
  isInFront: () => boolean = () => inForeground(process.pid),
): (() => void) | undefined {
  if (!isInFront()) return undefined;
  const { stdin } = process;
  let raw = false;
  const toRaw = (): void => {
    if (raw || !isInFront()) return;
    raw = true;
    stdin.setRawMode(true);
    stdin.resume();
  };
  const restore = (): void => {
    if (!raw) return;
    raw = false;
    stdin.pause();
    stdin.setRawMode(false);
  };
  const back = (): void => {
    // The mode may have changed while we were stopped.
    raw = false;
    toRaw();
  };
  const dieBy = (signal: "SIGHUP" | "SIGQUIT") => (): void => {
    stop();
    process.kill(process.pid, signal);
  };
  const [hangUp, quit] = [dieBy("SIGHUP"), dieBy("SIGQUIT")];
  const read = (text: string): void => {
    if (text.startsWith(ESCAPE)) return;
    for (const key of text) {
      if (key === CTRL_Z) {
        restore();
        process.kill(GROUP, "SIGTSTP");
      } else if (key === CTRL_BACKSLASH) quit();
      else pressed(key);
    }
  };
  const stop = (): void => {
    restore();
    stdin.off("data", read);
    process.off("exit", stop);
    process.off("SIGCONT", back);
    process.off("SIGHUP", hangUp);
    process.off("SIGQUIT", quit);
  };
  // The terminal is gone; SIGHUP reports it too.
  stdin.on("error", () => {});
  stdin.setEncoding("utf8");
  stdin.on("data", read);
  process.on("exit", stop);
  process.on("SIGCONT", back);
  process.on("SIGHUP", hangUp);
  process.on("SIGQUIT", quit);
  toRaw();
  return stop;
}

/** Whether our process group is the terminal's foreground group. */
function inForeground(pid: number): boolean {
  const [group, front] = groups(pid);
  return group !== undefined && group === front;
}

function groups(pid: number): (number | undefined)[] {
  try {
    const text = readFileSync("/proc/self/stat", "utf8");
    // pid (name) state ppid pgrp session tty tpgid …; the name may contain spaces and parentheses.
    const fields = text.slice(text.lastIndexOf(")") + 2).split(" ");
    return [Number(fields[2]), Number(fields[5])];
  } catch {
    const { stdout } = spawnSync("ps", ["-o", "pgid=,tpgid=", "-p", String(pid)], { encoding: "utf8" });
    return (stdout ?? "").trim().split(/\s+/).map(Number);
  }
}
