/**
 * Other servers that batch, behind the same function on the same card: Mosec and LitServe.
 *
 * Each has several settings that its documentation names for throughput. What they are worth depends on the machine, so each
 * is tried for a few seconds, saturated, and the fastest is measured.
 */
import { spawnSync } from "node:child_process";

export interface PeerSettings {
  readonly batch: number;
  readonly wait_ms: number;
  /** Processes that call the function, all on the same GPU. */
  readonly workers: number;
  /** Mosec: processes that parse requests, and as many that write answers; 0: the workers do it. */
  readonly stages?: number;
  /** LitServe: processes that take requests. */
  readonly servers?: number;
}

export interface Peer {
  readonly name: string;
  readonly package: string;
  readonly file: string;
  readonly path: string;
  readonly settings: readonly Omit<PeerSettings, "batch" | "wait_ms">[];
}

export const PEERS: readonly Peer[] = [
  {
    name: "Mosec",
    package: "mosec",
    file: "mosec_server.py",
    path: "/inference",
    settings: [
      { workers: 1, stages: 0 },
      { workers: 2, stages: 0 },
      { workers: 2, stages: 3 },
    ],
  },
  {
    name: "LitServe",
    package: "litserve",
    file: "litserve_server.py",
    path: "/predict",
    settings: [
      { workers: 1, servers: 4 },
      { workers: 2, servers: 4 },
    ],
  },
];

/** Versions by package, or what to do about the missing ones. */
export function installedPeers(python: string): { readonly versions: ReadonlyMap<string, string> } | string {
  const names = PEERS.map((peer) => peer.package);
  const script =
    "import importlib.metadata as m, sys\n" +
    "for name in sys.argv[1:]:\n" +
    "    try: print(name, m.version(name))\n" +
    "    except m.PackageNotFoundError: pass\n";
  const { stdout } = spawnSync(python, ["-c", script, ...names], { encoding: "utf8" });
  const versions = new Map(
    (stdout ?? "")
      .trim()
      .split("\n")
      .filter((line) => line !== "")
      .map((line) => line.split(" ") as [string, string]),
  );
  const missing = names.filter((name) => !versions.has(name));
  if (missing.length === 0) return { versions };
  return (
    `--peers: ${python} has no ${missing.join(" and no ")}; ${python} -m pip install ${missing.join(" ")}, ` +
    'or without a network as bench/README.md says under "On a real GPU"'
  );
}
