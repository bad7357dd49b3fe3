/**
 * `npm run audit`: does the registry know of a vulnerability in a package that runs in production?
 *
 *   npm run audit                  exit 1 when one is known, each with what mends it
 *   npm run audit -- --require     exit 1 also when nobody could be asked; for a release
 *
 * Mirrors and proxies of the registry often do not answer this question. That is no finding and fails no build, but
 * it must not look like a clean bill either: it says that nothing was checked.
 */
import { spawnSync } from "node:child_process";

/** What `npm audit --json` prints, as far as it is read; an answer that could not be had lacks the version. */
interface Report {
  readonly auditReportVersion?: number;
  readonly message?: string;
  readonly error?: { readonly summary?: string };
  readonly vulnerabilities?: Readonly<Record<string, Vulnerable>>;
  readonly metadata?: { readonly dependencies?: { readonly prod?: number } };
}

interface Vulnerable {
  readonly severity: string;
  readonly range: string;
  /** What is known of it, or the name of the package through which it comes. */
  readonly via: readonly (string | { readonly title: string; readonly url: string })[];
  readonly fixAvailable: boolean | { readonly name: string; readonly version: string };
}

export interface Verdict {
  readonly asked: boolean;
  readonly found: number;
  readonly text: string;
}

export function judge(printed: string): Verdict {
  const report = parse(printed);
  if (report?.auditReportVersion === undefined) {
    const said = report?.message ?? (report?.error?.summary || "no answer");
    // Behind the dash stands the address that was asked, which is the business of whoever set it.
    const why = said.replace(/ - .*$/s, "");
    return {
      asked: false,
      found: 0,
      text: `audit: NOTHING WAS CHECKED: the registry did not answer (${why}); ask one that does, with --registry URL`,
    };
  }
  const found = Object.entries(report.vulnerabilities ?? {});
  const packages = report.metadata?.dependencies?.prod;
  const of = packages === undefined ? "" : `${packages} packages of production, `;
  const lines = found.map(([name, vulnerable]) => line(name, vulnerable));
  return {
    asked: true,
    found: found.length,
    text: [`audit: ${of}${found.length === 0 ? "no" : found.length} known vulnerable`, ...lines].join("\n"),
  };
}

function line(name: string, { severity, range, via, fixAvailable }: Vulnerable): string {
  const why = via.map((each) => (typeof each === "string" ? `through ${each}` : `${each.title} ${each.url}`));
  const fix =
    typeof fixAvailable === "object" ? `${fixAvailable.name}@${fixAvailable.version}` : "npm update";
  return `  ${severity} ${name} ${range}: ${why.join("; ")}; ${fixAvailable === false ? "no fix yet" : `fix: ${fix}`}`;
}

function parse(printed: string): Report | undefined {
  try {
    return JSON.parse(printed) as Report;
  } catch {
    return undefined;
  }
}

if (import.meta.main) {
  const words = process.argv.slice(2);
  const rest = words.filter((word) => word !== "--require");
  const { stdout } = spawnSync("npm", ["audit", "--omit=dev", "--json", ...rest], { encoding: "utf8" });
  const verdict = judge(stdout ?? "");
  console.error(verdict.text);
  process.exitCode = verdict.found > 0 || (!verdict.asked && words.includes("--require")) ? 1 : 0;
}
