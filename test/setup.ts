/**
 * What the tests need beside Node: a real Python 3, for the python backend.
 *
 * Installed from Debian's packages where it is missing and that is possible; otherwise a clear failure.
 */
import { spawnSync } from "node:child_process";

interface Need {
  readonly command: string;
  readonly debianPackage: string;
  readonly what: string;
}

const NEEDS: readonly Need[] = [
  {
    command: "python3",
    debianPackage: "python3",
    what: "the python backend is tested with real child processes",
  },
];

export function setUp(): void {
  const missing = NEEDS.filter(({ command }) => !runs(command, "--version"));
  if (missing.length === 0) return;
  const packages = missing.map(({ debianPackage }) => debianPackage);
  console.error(`installing ${packages.join(", ")}: ${missing.map(({ what }) => what).join("; ")}`);
  const installed =
    runs("apt-get", "update") && runs("apt-get", "install", "-y", "--no-install-recommends", ...packages);
  const still = missing.filter(({ command }) => !runs(command, "--version"));
  if (still.length === 0) return;
  const names = still.map(({ command }) => command).join(", ");
  const hint = installed ? "" : ` (apt-get install ${packages.join(" ")} did not work)`;
  console.error(`the tests need ${names}${hint}; install it and run npm test again`);
  process.exit(1);
}

function runs(command: string, ...words: string[]): boolean {
  return spawnSync(command, words, { stdio: "ignore" }).status === 0;
}
