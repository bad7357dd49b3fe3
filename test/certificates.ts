/**
 * Certificates for tests, made by openssl when they are needed: an authority, and what it signs. The keys are
 * on the curve P-256, which takes a few milliseconds; nothing here is a secret.
 */
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

/** A certificate and its key, as text and as files. */
export interface Pair {
  readonly cert: string;
  readonly key: string;
  readonly certFile: string;
  readonly keyFile: string;
}

export interface Wishes {
  /** As openssl writes them; default: this machine. */
  readonly names?: string;
  /** How long it is good from now; negative: it has ended. */
  readonly days?: number;
}

const HERE = "DNS:localhost,IP:127.0.0.1";

export class Authority implements Disposable {
  readonly folder = mkdtempSync(join(tmpdir(), "ferry-tls-"));
  readonly own: Pair;
  #made = 0;

  constructor(name = "Test Authority") {
    const [certFile, keyFile] = this.#files();
    const subject = ["-subj", `/CN=${name}`, "-days", "30"];
    openssl("req", "-x509", ...newKey(keyFile), "-out", certFile, ...subject);
    this.own = pairOf(certFile, keyFile);
  }

  issue({ names = HERE, days = 30 }: Wishes = {}): Pair {
    const [certFile, keyFile] = this.#files();
    const request = join(this.folder, "request.pem");
    const extensions = join(this.folder, "extensions");
    writeFileSync(extensions, `subjectAltName=${names}\nbasicConstraints=CA:FALSE\n`);
    openssl("req", ...newKey(keyFile), "-out", request, "-subj", "/CN=ferry-test");
    const { certFile: ca, keyFile: caKey } = this.own;
    const signer = ["-CA", ca, "-CAkey", caKey, "-CAcreateserial", "-extfile", extensions];
    openssl("x509", "-req", "-in", request, "-out", certFile, ...signer, "-days", String(days));
    return pairOf(certFile, keyFile);
  }

  /** Puts a pair where another is; the certificate first, as most tools do, and each file whole. */
  replace(old: Pair, { cert, key }: Pair): void {
    // Whoever reads a file while it is written finds it empty.
    for (const [file, text] of [
      [old.certFile, cert],
      [old.keyFile, key],
    ] as const) {
      writeFileSync(`${file}.next`, text);
      renameSync(`${file}.next`, file);
    }
  }

  [Symbol.dispose](): void {
    rmSync(this.folder, { recursive: true });
  }

  #files(): [certFile: string, keyFile: string] {
    const number = ++this.#made;
    return [join(this.folder, `${number}.crt`), join(this.folder, `${number}.key`)];
  }
}

function newKey(keyFile: string): string[] {
  return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", keyFile];
}

function pairOf(certFile: string, keyFile: string): Pair {
  const [cert, key] = [readFileSync(certFile, "utf8"), readFileSync(keyFile, "utf8")];
  return { cert, key, certFile, keyFile };
}

function openssl(...words: readonly string[]): void {
  execFileSync("openssl", words, { stdio: ["ignore", "ignore", "pipe"] });
}
