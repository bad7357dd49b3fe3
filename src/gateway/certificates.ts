/**
 * Certificates in files: read and checked at the start, and polled every `reloadMs`.
 *
 * Used only if complete: all files are PEM, the key matches the certificate, and OpenSSL accepts both. Otherwise the
 * start fails with a one-line Error; later it is a notice, once per bad text, and the last good material stays in use,
 * since files are often replaced one after the other. Contents are compared, not times: a mounted secret changes by
 * symlink.
 *
 * A certificate that expires within 14 days is reported at the start, on reaching that age, and then daily.
 */
import { createPrivateKey, X509Certificate } from "node:crypto";
import { open } from "node:fs/promises";
import { createSecureContext } from "node:tls";
import type { Alarm, Clock } from "../app/clock.ts";
import type { Events } from "../observe/events.ts";

export interface CertificatePaths {
  /** Our chain, leaf first; never without `keyFile`. */
  readonly certFile?: string | undefined;
  readonly keyFile?: string | undefined;
  readonly caFile?: string | undefined;
}

export interface Material {
  readonly cert?: string;
  readonly key?: string;
  readonly ca?: string;
}

interface Texts {
  readonly certFile?: string;
  readonly keyFile?: string;
  readonly caFile?: string;
}

const DAY_MS = 86_400_000;
const WARN_DAYS = 14;
/** A renewed certificate is in use within this time. */
export const CERTIFICATE_RELOAD_MS = 2000;
/** A bundle of all public CAs has about 220 KB. */
const MAX_FILE_BYTES = 2 ** 20;
const CHUNK_BYTES = 16 * 1024;

export class Certificates {
  readonly #setting: string;
  readonly #paths: CertificatePaths;
  readonly #reloadMs: number;
  readonly #clock: Clock;
  readonly #events: Events;
  readonly #listeners: ((material: Material) => void)[] = [];
  #material: Material = {};
  /** The last text read, good or bad; a bad one is reported once. */
  #seen = "";
  #toldAt = -Infinity;
  #alarm: Alarm | undefined;
  #stopped = false;

  /** `setting`: the prefix of messages, such as "tls". */
  constructor(setting: string, paths: CertificatePaths, reloadMs: number, clock: Clock, events: Events) {
    this.#setting = setting;
    this.#paths = paths;
    this.#reloadMs = reloadMs;
    this.#clock = clock;
    this.#events = events;
  }

  get material(): Material {
    return this.#material;
  }

  onChange(changed: (material: Material) => void): void {
    this.#listeners.push(changed);
  }

  async start(): Promise<void> {
    const texts = await readAll(this.#setting, this.#paths);
    this.#seen = JSON.stringify(texts);
    this.#material = checked(this.#setting, texts);
    this.#tellEnd();
    this.#lookLater();
  }

  stop(): void {
    this.#stopped = true;
    this.#alarm?.cancel();
  }

  /** For a reload: rejects with one line if the files are unusable; `commit` switches to them. */
  async prepare(): Promise<{ commit(): void; abandon(): Promise<void> }> {
    const texts = await readAll(this.#setting, this.#paths);
    checked(this.#setting, texts);
    const commit = (): void => {
      if (this.#stopped) return;
      this.#use(texts);
      this.#tellEnd();
    };
    return { commit, abandon: () => Promise.resolve() };
  }

  #lookLater(): void {
    if (this.#stopped) return;
    this.#alarm = this.#clock.at(this.#clock.now() + this.#reloadMs, () => void this.#look());
  }

  async #look(): Promise<void> {
    try {
      const texts = await readAll(this.#setting, this.#paths);
      if (!this.#stopped) this.#use(texts);
    } catch (error) {
      const { message } = error as Error;
      this.#refuse(message, message);
    }
    this.#tellEnd();
    this.#lookLater();
  }

  #use(texts: Texts): void {
    const text = JSON.stringify(texts);
    if (text === this.#seen) return;
    let material: Material;
    try {
      material = checked(this.#setting, texts);
    } catch (error) {
      return this.#refuse(text, (error as Error).message);
    }
    this.#seen = text;
    if (sameMaterial(material, this.#material)) return;
    this.#material = material;
    this.#toldAt = -Infinity;
    for (const changed of this.#listeners) changed(material);
    const until = material.cert === undefined ? "" : `; the certificate ends on ${dateOf(material.cert)}`;
    this.#notice("info", `${this.#setting}: the files changed and are used from now on${until}`);
  }

  #refuse(text: string, why: string): void {
    if (this.#stopped || text === this.#seen) return;
    this.#seen = text;
    this.#notice("warn", `${why}; what was read before stays in use`);
  }

  /** Daily while it is about to expire. */
  #tellEnd(): void {
    const { cert } = this.#material;
    const now = this.#clock.now();
    if (cert === undefined || this.#stopped || now < this.#toldAt + DAY_MS) return;
    const end = endOf(cert);
    if (now < end - WARN_DAYS * DAY_MS) return;
    this.#toldAt = now;
    const which = `${this.#setting}.certFile: the certificate`;
    if (now >= end) this.#notice("error", `${which} ended on ${dateOf(cert)}; it is refused; renew it now`);
    else {
      const days = Math.floor((end - now) / DAY_MS);
      const left = days === 0 ? "less than a day" : days === 1 ? "1 day" : `${days} days`;
      this.#notice("warn", `${which} ends on ${dateOf(cert)}, in ${left}; renew it`);
    }
  }

  #notice(level: "info" | "warn" | "error", message: string): void {
    this.#events.emit("notice", { level, message });
  }
}

async function readAll(setting: string, paths: CertificatePaths): Promise<Texts> {
  const texts: { certFile?: string; keyFile?: string; caFile?: string } = {};
  for (const name of ["certFile", "keyFile", "caFile"] as const) {
    const path = paths[name];
    if (path !== undefined) texts[name] = await readPem(`${setting}.${name}`, path);
  }
  return texts;
}

async function readPem(setting: string, path: string): Promise<string> {
  try {
    await using file = await open(path);
    const chunk = Buffer.allocUnsafe(CHUNK_BYTES);
    let text = "";
    for (;;) {
      const { bytesRead } = await file.read(chunk, 0, chunk.length, null);
      if (bytesRead === 0) return text;
      text += chunk.toString("latin1", 0, bytesRead);
      if (text.length > MAX_FILE_BYTES) throw new Error("it is larger than 1 MiB");
    }
  } catch (error) {
    const { code, message } = error as NodeJS.ErrnoException;
    const why =
      code === "ENOENT" || code === "ENOTDIR"
        ? "there is no such file"
        : code === "EACCES" || code === "EPERM"
          ? "it may not be read; check its permissions"
          : code === "EISDIR"
            ? "it is a folder; name the file in it"
            : (code ?? message);
    throw new Error(`${setting}: cannot read ${path}: ${why}`, { cause: error });
  }
}

/** Reports now what would make a handshake fail later. */
function checked(setting: string, { certFile: cert, keyFile: key, caFile: ca }: Texts): Material {
  if (ca !== undefined)
    for (const each of certificatesIn(`${setting}.caFile`, ca)) parse(setting, "caFile", each);
  if (cert !== undefined && key !== undefined) checkPair(setting, cert, key);
  const material = { ...(cert && { cert }), ...(key && { key }), ...(ca && { ca }) };
  try {
    createSecureContext(material);
  } catch (error) {
    throw new Error(`${setting}: OpenSSL refuses these files: ${oneLine(error)}`, { cause: error });
  }
  return material;
}

function checkPair(setting: string, cert: string, key: string): void {
  const [own] = certificatesIn(`${setting}.certFile`, cert).map((each) => parse(setting, "certFile", each));
  if (!key.includes("PRIVATE KEY-----")) {
    throw new Error(`${setting}.keyFile: holds no private key in PEM (-----BEGIN PRIVATE KEY-----)`);
  }
  if (/-----BEGIN ENCRYPTED|^Proc-Type:.*ENCRYPTED/m.test(key)) {
    throw new Error(`${setting}.keyFile: the key has a passphrase; write it without one: openssl pkey -in …`);
  }
  let matches: boolean;
  try {
    matches = own!.checkPrivateKey(createPrivateKey(key));
  } catch (error) {
    throw new Error(`${setting}.keyFile: cannot be read as a private key: ${oneLine(error)}`, {
      cause: error,
    });
  }
  if (!matches)
    throw new Error(`${setting}.keyFile: is not the key of the certificate in ${setting}.certFile`);
}

function certificatesIn(setting: string, text: string): string[] {
  const found = text.match(/-----BEGIN CERTIFICATE-----[^-]*-----END CERTIFICATE-----/g);
  if (found === null)
    throw new Error(`${setting}: holds no certificate in PEM (-----BEGIN CERTIFICATE-----)`);
  return found;
}

function parse(setting: string, name: string, text: string): X509Certificate {
  try {
    return new X509Certificate(text);
  } catch (error) {
    throw new Error(`${setting}.${name}: a certificate in it is damaged: ${oneLine(error)}`, {
      cause: error,
    });
  }
}

function oneLine(error: unknown): string {
  return (error as Error).message.replaceAll(/\s+/g, " ").slice(0, 200);
}

function dateOf(cert: string): string {
  return new Date(endOf(cert)).toISOString().slice(0, 10);
}

function sameMaterial(a: Material, b: Material): boolean {
  return a.cert === b.cert && a.key === b.key && a.ca === b.ca;
}

function endOf(cert: string): number {
  return Date.parse(new X509Certificate(cert).validTo);
}
