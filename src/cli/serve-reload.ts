/** When `ferry serve` reads its config again: on SIGHUP, and when an operator asks the admin listener for it. */
import { closeSync, openSync } from "node:fs";
import { jsonLine } from "./terminal/banner.ts";
import type { Config } from "../app/config/config.ts";
import { Reloader } from "../app/reload.ts";
import type { Served, ServeParts } from "./serve.ts";

/** A terminal that was closed sends SIGHUP too, and ends it. Undefined: there is no file, or nothing can change. */
export function hearReloads(
  config: Config,
  ferry: Served,
  parts: ServeParts,
  log: (line: string) => void,
  quit: () => void,
): Reloader | undefined {
  const { clock, load } = parts;
  if (load === undefined || ferry.change === undefined) return undefined;
  const tell = (level: "info" | "warn", message: string): void => {
    const { logLevel } = reloader.config.telemetry;
    const quiet = logLevel === "silent" || logLevel === "error" || (logLevel === "warn" && level === "info");
    if (!quiet) log(jsonLine(level, clock.now(), message, {}));
  };
  const reloader = new Reloader(config, { load, apply: (next) => ferry.change!(next), tell });
  ferry.onReload = () => reloader.reload();
  parts.onHangup?.(() => {
    if (parts.terminalGone?.() === true) quit();
    else void reloader.reload();
  });
  return reloader;
}

/**
 * SIGHUP from the first moment on: one that comes during the start, which may take minutes, would end the process. It counts
 * when somebody listens.
 */
export function holdHangups(
  parts: Pick<ServeParts, "onHangup" | "terminalGone" | "signals">,
): (listener: () => void) => void {
  let missed = false;
  let hear = (): void => {
    if (parts.terminalGone?.() === true) parts.signals.raise("SIGTERM");
    else missed = true;
  };
  parts.onHangup?.(() => hear());
  return (listener) => {
    hear = listener;
    if (missed) listener();
  };
}

/** Opening it fails once the window, or the connection, is gone. */
export function hasTerminal(): boolean {
  try {
    closeSync(openSync("/dev/tty", "r"));
    return true;
  } catch {
    return false;
  }
}
