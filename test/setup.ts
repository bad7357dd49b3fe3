/**
 * What the tests need beside Node: a real Python 3, for the python backend, a real Redis, for its engine,
 * OpenSSL, to make certificates, curl, as a client, PostgreSQL, for the request log, Prometheus, to scrape and to
 * check the rules, Chromium, to look at the dashboard, and nginx, as an edge.
 *
 * Installed from Debian's packages where it is missing and that is possible; otherwise a clear failure. Only
 * the programs are wanted: the tests start their own servers on their own ports, and Debian's packages would
 * also start services, on the usual ones. While packages are installed a policy forbids that.
 */
import { spawnSync } from "node:child_process";
import { existsSync, globSync, rmSync, writeFileSync } from "node:fs";

interface Need {
  readonly command: string;
  readonly debianPackage: string;
  readonly what: string;
  /** What it answers when it is there; "--version" when left out. */
  readonly ask?: string;
  /** Where it is, when that is not on the PATH. */
  readonly place?: string;
}

const NEEDS: readonly Need[] = [
  {
    command: "python3",
    debianPackage: "python3",
    what: "the python backend is tested with real child processes",
  },
  {
    command: "redis-server",
    debianPackage: "redis-server",
    what: "the Redis engine is tested with real servers",
  },
  {
    command: "openssl",
    ask: "version",
    debianPackage: "openssl",
    what: "TLS is tested with certificates that the tests make",
  },
  { command: "curl", debianPackage: "curl", what: "HTTP/2 is tested with a client of somebody else" },
  {
    command: "postgres",
    place: "/usr/lib/postgresql/*/bin/initdb",
    debianPackage: "postgresql",
    what: "the request log is tested with a real PostgreSQL",
  },
  {
    command: "prometheus",
    debianPackage: "prometheus",
    what: "metrics are scraped, and their rules checked, by a real Prometheus",
  },
  {
    command: "chromium",
    debianPackage: "chromium",
    what: "the dashboard is tested in a real browser",
  },
  {
    command: "nginx",
    ask: "-v",
    place: "/usr/sbin/nginx",
    debianPackage: "nginx",
    what: "the edge of deploy/edge is tested with a real nginx",
  },
];

/** Debian asks it before a package starts or stops a service; 101: it may not. */
const SERVICE_POLICY = "/usr/sbin/policy-rc.d";

export function setUp(): void {
  const missing = NEEDS.filter(isMissing);
  if (missing.length === 0) return;
  const packages = missing.map(({ debianPackage }) => debianPackage);
  console.error(`installing ${packages.join(", ")}: ${missing.map(({ what }) => what).join("; ")}`);
  const installed = runs("apt-get", "update") && install(packages);
  const still = missing.filter(isMissing);
  if (still.length === 0) return;
  const names = still.map(({ command }) => command).join(", ");
  const hint = installed ? "" : ` (apt-get install ${packages.join(" ")} did not work)`;
  console.error(`the tests need ${names}${hint}; install it and run npm test again`);
  process.exit(1);
}

function isMissing({ command, place, ask = "--version" }: Need): boolean {
  if (place !== undefined && globSync(place).length > 0) return false;
  return !runs(command, ask);
}

function install(packages: readonly string[]): boolean {
  const ours = !existsSync(SERVICE_POLICY) && mayWrite(SERVICE_POLICY, "#!/bin/sh\nexit 101\n");
  try {
    return runs("apt-get", "install", "-y", "--no-install-recommends", ...packages);
  } finally {
    if (ours) rmSync(SERVICE_POLICY);
  }
}

/** False where it is not allowed, or not Debian: there, nothing can be installed either. */
function mayWrite(path: string, script: string): boolean {
  try {
    writeFileSync(path, script, { mode: 0o755 });
    return true;
  } catch {
    return false;
  }
}

function runs(command: string, ...words: string[]): boolean {
  return spawnSync(command, words, { stdio: "ignore" }).status === 0;
}
