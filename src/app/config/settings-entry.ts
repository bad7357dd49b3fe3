/**
 * The part of the table that says who may enter and how: credentials, certificates, what is refused when
 * more arrives than the workers can serve.
 *
 * Groups that need a file to mean anything (`tls`, `auth.jwt`) are complete or left out; the rules for that
 * are in `app/config/check-entry.ts`.
 */
import { url } from "./setting-addresses.ts";
import { boolean, choice, group, integer, list, number, optional, path, text } from "./setting-kinds.ts";

const second = 1000;
const minute = 60 * second;
const hour = 60 * minute;

/** All asymmetric: whoever can check a token must not be able to make one. */
export const JWT_ALGORITHMS = [
  "RS256",
  "RS384",
  "RS512",
  "PS256",
  "PS384",
  "PS512",
  "ES256",
  "ES384",
  "ES512",
  "EdDSA",
] as const;

const reloadMs = integer("How often the files are looked at; a change is used from then on.", {
  default: 2 * second,
  min: 100,
  max: hour,
  unit: "ms",
});

/** The certificate of our own listeners. */
export const edgeTls = group("TLS at the listeners; left out: plain HTTP.", {
  certFile: optional(
    path("The certificate and what lies between it and its root (PEM).", { example: "./tls.crt" }),
  ),
  keyFile: optional(path("Its private key (PEM).", { example: "./tls.key" })),
  minVersion: choice("The oldest TLS that is spoken.", ["TLSv1.2", "TLSv1.3"], "TLSv1.2"),
  http2: boolean("Whether clients may speak HTTP/2; those that do not ask for it lose nothing.", true),
  maxStreams: integer("Requests at once on one HTTP/2 connection.", { default: 256, min: 1, max: 10_000 }),
  reloadMs,
});

/** What we show and ask when we call a worker. */
export const workerTls = group("TLS to the workers, beside https:// in their URLs.", {
  caFile: optional(
    path("Who may have signed the workers' certificates (PEM); left out: the usual authorities.", {
      example: "./workers-ca.crt",
    }),
  ),
  certFile: optional(
    path("The certificate that Ferry shows to the workers (PEM).", { example: "./ferry.crt" }),
  ),
  keyFile: optional(path("Its private key (PEM).", { example: "./ferry.key" })),
  serverName: optional(
    text("The name that the workers' certificates carry; left out: the host in the URL.", {
      maxLength: 253,
      example: "gpu.internal",
    }),
  ),
  reloadMs,
});

const jwt = group("How JSON Web Tokens are checked; left out: none are taken.", {
  jwksUrl: optional(url("Where the public keys are.", ["https", "http"], "https://id.example/jwks.json")),
  publicKeyFile: optional(path("Or the public key itself (PEM).", { example: "./jwt.pem" })),
  algorithm: choice("The one algorithm that is taken, whatever a token says.", JWT_ALGORITHMS, "RS256"),
  issuer: optional(
    text("The `iss` that a token must carry.", { maxLength: 512, example: "https://id.example" }),
  ),
  audience: optional(text("The `aud` that a token must carry.", { maxLength: 512, example: "ferry" })),
  userClaim: text("The claim that names the user.", { maxLength: 128, default: "sub" }),
  tierClaim: text("The claim that names the tier.", { maxLength: 128, default: "tier" }),
  defaultTier: optional(
    text("The tier of a token without that claim; left out: such a token is refused.", {
      maxLength: 64,
      example: "free",
    }),
  ),
  skewMs: integer("How far the issuer's clock may be from ours.", {
    default: minute,
    min: 0,
    max: minute,
    unit: "ms",
  }),
  maxLifeMs: integer("A token that is good for longer than this from now is refused.", {
    default: 24 * hour,
    min: minute,
    max: 366 * 24 * hour,
    unit: "ms",
  }),
  jwksCacheMs: integer("How long the keys of jwksUrl are used before they are fetched again.", {
    default: 10 * minute,
    min: second,
    max: 24 * hour,
    unit: "ms",
  }),
  jwksCooldownMs: integer("The least time between two fetches, whatever tokens ask for.", {
    default: 30 * second,
    min: second,
    max: hour,
    unit: "ms",
  }),
  jwksTimeoutMs: integer("How long a fetch may take.", {
    default: 2 * second,
    min: 100,
    max: minute,
    unit: "ms",
  }),
});

export const auth = group("Who may call.", {
  mode: choice(
    "`none`: everybody is the tenant `anonymous`; `required`: an API key or a JSON Web Token.",
    ["none", "required"],
    "none",
  ),
  anonymousTier: optional(
    text("The tier of everybody while auth.mode is none; left out: the first.", {
      maxLength: 64,
      example: "enterprise",
    }),
  ),
  allowedHosts: list(
    "With `none` on loopback: host names beside localhost by which requests may come, and from whose pages; " +
      "for a proxy on the same machine that passes its name on.",
    text("One name, without a port.", { maxLength: 253, example: "api.example.com" }),
    { min: 0, max: 100 },
  ),
  keysFile: optional(
    path("The API keys' digests; with the redis engine they are in Redis instead.", {
      example: "./keys.json",
    }),
  ),
  secret: optional(
    text("What the digests are keyed with; left out: Ferry makes one and keeps it beside them.", {
      minLength: 32,
      maxLength: 512,
      secret: true,
      example: "${FERRY_KEY_SECRET}",
    }),
  ),
  reloadMs: integer("How often keys are looked up again: a revoked one works no longer than this.", {
    default: 5 * second,
    min: 100,
    max: 10 * second,
    unit: "ms",
  }),
  graceMs: integer("How long a key that was seen goes on working while Redis cannot be asked.", {
    default: minute,
    min: 0,
    max: hour,
    unit: "ms",
  }),
  jwt,
});

export const admission = group("What is refused when more arrives than the workers can serve.", {
  mode: choice(
    "`predictive`: what would miss its deadline; `thresholds`: by load and depth; `off`: only what no queue can hold.",
    ["predictive", "thresholds", "off"],
    "predictive",
  ),
  targetUtilization: number("The share of capacity to plan with; `thresholds` sheds above it.", {
    default: 0.7,
    min: 0.05,
    max: 1,
    unit: "share",
  }),
  lastTierDepth: integer("`thresholds`: with more tasks queued than this the last tier is refused.", {
    default: 100,
    min: 0,
    max: 10_000_000,
  }),
  firstTierDepth: integer("`thresholds`: with more than this only the first tier is let in.", {
    default: 500,
    min: 0,
    max: 10_000_000,
  }),
  maxWorkerLoad: number("A worker that says it is fuller than this does not count as capacity.", {
    default: 0.9,
    min: 0.05,
    max: 1,
    unit: "share",
  }),
});
