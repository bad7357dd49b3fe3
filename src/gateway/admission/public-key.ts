/**
 * Public keys that fit the configured algorithm: RSA of 2048 bits or more for RS and PS, the algorithm's own
 * curve for ES, Ed25519 or Ed448 for EdDSA. A key of another kind is refused when it is read, not when a
 * token comes.
 */
import { createPublicKey, type KeyObject } from "node:crypto";
import type { Clock } from "../../app/clock.ts";
import type { Events } from "../../observe/events.ts";
import type { PublicKeys } from "./jwt.ts";
import { WatchedFile } from "./watched-file.ts";

const CURVES: ReadonlyMap<string, string> = new Map([
  ["ES256", "prime256v1"],
  ["ES384", "secp384r1"],
  ["ES512", "secp521r1"],
]);
const MIN_RSA_BITS = 2048;

export function fits(key: KeyObject, algorithm: string): boolean {
  const { asymmetricKeyType: type, asymmetricKeyDetails: details } = key;
  if (/^[RP]S/.test(algorithm)) return type === "rsa" && (details?.modulusLength ?? 0) >= MIN_RSA_BITS;
  if (algorithm === "EdDSA") return type === "ed25519" || type === "ed448";
  return type === "ec" && details?.namedCurve === CURVES.get(algorithm);
}

/** The key of a PEM text (a public key, or a certificate with one); an Error says what is wrong with it. */
export function readPem(text: string, algorithm: string): KeyObject {
  if (text.includes("PRIVATE KEY"))
    throw new Error("it holds a private key; Ferry needs only the public one");
  let key: KeyObject;
  try {
    key = createPublicKey(text);
  } catch (error) {
    throw new Error("it holds no public key in PEM (-----BEGIN PUBLIC KEY-----)", { cause: error });
  }
  if (fits(key, algorithm)) return key;
  const bits = key.asymmetricKeyDetails?.modulusLength;
  const what = `${key.asymmetricKeyType}${bits === undefined ? "" : ` of ${bits} bits`}`;
  throw new Error(`its key (${what}) cannot be used with ${algorithm}; see auth.jwt.algorithm`);
}

/** One key in a file, whatever `kid` a token names; read again when the file changed. */
export class PublicKeyFile implements PublicKeys {
  readonly #watched: WatchedFile;
  #key: KeyObject | undefined;
  #trouble = "";

  private constructor(path: string, algorithm: string, reloadMs: number, clock: Clock, events: Events) {
    const failed = (why: string): void => {
      this.#trouble = `auth.jwt.publicKeyFile ${path}: ${why}`;
      if (this.#key === undefined) return;
      const message = `${this.#trouble}; the key that was read before stays in force`;
      events.emit("notice", { level: "warn", message });
    };
    const changed = (text: string | undefined): void => {
      try {
        if (text === undefined) throw new Error("there is no such file");
        this.#key = readPem(text, algorithm);
      } catch (error) {
        failed((error as Error).message);
      }
    };
    this.#watched = new WatchedFile(path, reloadMs, clock, { changed, failed });
  }

  /** Rejects with one line when there is no usable key at the start. */
  static async open(
    path: string,
    algorithm: string,
    reloadMs: number,
    clock: Clock,
    events: Events,
  ): Promise<PublicKeyFile> {
    const file = new PublicKeyFile(path, algorithm, reloadMs, clock, events);
    await file.#watched.start();
    if (file.#key !== undefined) return file;
    file.close();
    throw new Error(file.#trouble);
  }

  find(): KeyObject | undefined {
    return this.#key;
  }

  close(): void {
    this.#watched.stop();
  }
}
