/**
 * The settings of one Ferry process, checked and with every default filled in.
 *
 * Types only. `settings.ts` is the table behind them (units, bounds, defaults), `app/config/load.ts` makes
 * a `Config` from a file.
 */
import type { ProtocolName } from "../../gateway/protocol/protocol.ts";

export interface Address {
  readonly host: string;
  readonly port: number;
}

export interface Config {
  readonly listen: Address;
  /** Left out: plain HTTP. */
  readonly tls?: EdgeTlsConfig;
  /** Without `listen`: no gRPC for clients. */
  readonly grpc: GrpcDoorConfig;
  readonly admin: { readonly listen: Address; readonly tls: boolean; readonly token?: string };
  readonly engine: EngineConfig;
  readonly zone: string;
  readonly api: { readonly defaultMode: "sync" | "async"; readonly maxPollMs: number };
  readonly models: readonly ModelConfig[];
  /** In order of priority. */
  readonly tiers: readonly TierConfig[];
  readonly auth: AuthConfig;
  readonly limits: LimitsConfig;
  readonly admission: AdmissionConfig;
  readonly results: { readonly ttlMs: number; readonly evictAfterRead: boolean; readonly maxBytes: number };
  readonly deadLetters: { readonly max: number; readonly ttlMs: number };
  readonly requestLog: RequestLogConfig;
  readonly telemetry: TelemetryConfig;
}

export interface RequestLogConfig {
  /** With its credentials: never to be shown. Left out: memory only. */
  readonly url?: string;
  readonly recent: number;
  readonly flushMs: number;
  readonly maxBufferedRows: number;
  readonly writeTimeoutMs: number;
  readonly retentionDays: number;
}

export interface TelemetryConfig {
  readonly metrics: boolean;
  readonly dashboard: boolean;
  readonly maxViewers: number;
  /** The collector's base; left out: no traces. */
  readonly otlpUrl?: string;
  readonly sample: number;
  readonly maxBufferedSpans: number;
  readonly exportTimeoutMs: number;
  readonly logLevel: "debug" | "info" | "warn" | "error" | "silent";
}

export interface EdgeTlsConfig {
  readonly certFile: string;
  readonly keyFile: string;
  readonly minVersion: "TLSv1.2" | "TLSv1.3";
  readonly http2: boolean;
  readonly maxStreams: number;
  readonly reloadMs: number;
}

export interface GrpcDoorConfig {
  readonly listen?: Address;
  readonly maxMessageBytes: number;
  readonly maxRows: number;
  readonly maxStreams: number;
}

export interface AuthConfig {
  readonly mode: "none" | "required";
  readonly anonymousTier: string;
  /** With mode none on loopback: by which names requests may come, and from whose pages. */
  readonly allowedHosts: readonly string[];
  /** Where API keys are with the memory engine; left out: there are none. */
  readonly keysFile?: string;
  /** Left out: one is made and kept beside the keys. */
  readonly secret?: string;
  readonly reloadMs: number;
  readonly graceMs: number;
  /** Left out: no token is taken. */
  readonly jwt?: JwtConfig;
}

/** Has a `jwksUrl` or a `publicKeyFile`, never both. */
export interface JwtConfig {
  readonly jwksUrl?: string;
  readonly publicKeyFile?: string;
  readonly algorithm: string;
  readonly issuer?: string;
  readonly audience?: string;
  readonly userClaim: string;
  readonly tierClaim: string;
  readonly defaultTier?: string;
  readonly skewMs: number;
  readonly maxLifeMs: number;
  readonly jwksCacheMs: number;
  readonly jwksCooldownMs: number;
  readonly jwksTimeoutMs: number;
}

export interface AdmissionConfig {
  readonly mode: "predictive" | "thresholds" | "off";
  readonly targetUtilization: number;
  readonly lastTierDepth: number;
  readonly firstTierDepth: number;
  readonly maxWorkerLoad: number;
}

export type EngineConfig = MemoryEngineConfig | RedisEngineConfig;

export interface MemoryEngineConfig {
  readonly kind: "memory";
  /** Left out: nothing is kept on disk. */
  readonly dataDir?: string;
}

/** Has a `url` or some `nodes`, never both. */
export interface RedisEngineConfig {
  readonly kind: "redis";
  /** With its credentials: never to be shown. */
  readonly url?: string;
  /** Seeds of a Cluster, or a primary and its replicas; empty when there is a `url`. */
  readonly nodes: readonly Address[];
  /** For `nodes`; never without a password. */
  readonly username?: string;
  readonly password?: string;
  /** For `nodes`. */
  readonly tls: boolean;
  readonly durability: "auto" | "replica" | "local";
  readonly keyPrefix: string;
  readonly connectTimeoutMs: number;
  readonly commandTimeoutMs: number;
  readonly waitTimeoutMs: number;
  readonly leaseMs: number;
  readonly beatMs: number;
  readonly aliveMs: number;
  readonly sweepMs: number;
  readonly zoneSpillMs: number;
}

/** What a process does: everything, take requests only, or run batches only. */
export type Role = "all" | "gateway" | "batcher";

export interface TierConfig {
  readonly name: string;
  readonly weight: number;
  /** Left out: no limit. */
  readonly ratePerMinute?: number;
}

export interface LimitsConfig {
  readonly maxBodyBytes: number;
  readonly maxQueued: number;
  /** Of the inputs of tasks that are queued or running. */
  readonly maxQueuedBytes: number;
  /** Of one request of a drop-in protocol over HTTP. */
  readonly maxInputs: number;
  readonly maxHeaders: number;
  readonly maxConnections: number;
  /** Left out: no limit (auth.mode none) */
  readonly perUserPerMinute?: number;
  readonly headersTimeoutMs: number;
  readonly requestTimeoutMs: number;
  readonly keepAliveTimeoutMs: number;
  readonly drainMs: number;
  /** How long kept connections are served while it drains, each to its next answer. */
  readonly lingerMs: number;
  /** A process that is silent for so long during a reload hangs. */
  readonly processAnswerMs: number;
  /** Requests on their way past the batches, and how long nothing of an answer may move. */
  readonly maxPassthrough: number;
  readonly passthroughIdleMs: number;
}

export interface ModelConfig {
  readonly name: string;
  readonly backend: BackendConfig;
  readonly maxBatchSize: number;
  /** Left out: no budget. */
  readonly maxBatchTokens?: number;
  readonly maxBatchBytes?: number;
  readonly maxWaitMs: number;
  readonly policy: "adaptive" | "latency" | "eco" | "fixed";
  /** Batches in a worker's hands. */
  readonly pipeline: "auto" | 1 | 2;
  readonly timeouts: { readonly queueMs: number; readonly workerMs: number; readonly totalMs: number };
  readonly retry: {
    readonly max: number;
    readonly baseMs: number;
    readonly maxMs: number;
    readonly budget: number;
  };
  readonly cache: { readonly ttlMs: number; readonly scope: "tenant" | "shared" | "off" };
  readonly collapse: boolean;
  readonly scaling: ScalingConfig;
  /** What clients may speak besides Ferry's own API. */
  readonly protocols: readonly ProtocolName[];
  /** Whatever has no route here goes to a worker as it came. */
  readonly passthrough: boolean;
  /** Patterns of `core/pattern.ts`. */
  readonly deny: readonly string[];
  readonly health: HealthConfig;
}

export interface ScalingConfig {
  readonly min: number;
  readonly max: number;
  readonly longLine: { readonly depth: number; readonly forMs: number; readonly add: number };
  readonly line: { readonly depth: number; readonly forMs: number; readonly add: number };
  readonly busy: { readonly load: number; readonly forMs: number; readonly add: number };
  readonly quiet: { readonly load: number; readonly forMs: number; readonly remove: number };
  readonly maxRemoveShare: number;
  readonly coolDownMs: number;
  readonly coldStartMs: number;
  readonly forecast: boolean;
  /** Ferry starts and ends its own workers. */
  readonly apply: boolean;
  readonly webhook?: string;
  readonly command?: string;
  readonly hookTimeoutMs: number;
}

export interface HealthConfig {
  readonly failures: number;
  readonly ejectMs: number;
  readonly maxEjectMs: number;
  readonly barMs: number;
  /** Between two questions to a worker's healthPath, and for its answer. */
  readonly askMs: number;
  readonly askTimeoutMs: number;
}

export type BackendConfig =
  | HttpBackendConfig
  | GrpcBackendConfig
  | PythonBackendConfig
  | ModuleBackendConfig
  | SimulatedBackendConfig;

export interface HttpBackendConfig {
  readonly kind: "http";
  readonly protocol: "batch" | ProtocolName;
  /** Full endpoint URLs, and names of DNS (`worker-addresses.ts`). */
  readonly workers: readonly string[];
  readonly dnsMs: number;
  readonly dnsGraceMs: number;
  readonly dnsMaxAddresses: number;
  /** Empty: as the system does. */
  readonly dnsServers: readonly string[];
  /** What the workers call the model; left out: as clients do. */
  readonly model?: string;
  /** What is sent to workers as `Authorization`: never to be shown. */
  readonly authorization?: string;
  /** Workers get the client's `Authorization`. */
  readonly forwardAuthorization: boolean;
  readonly maxReplyBytes: number;
  /** Left out: workers are not asked how they are. */
  readonly healthPath?: string;
  readonly tls: WorkerTlsConfig;
}

export interface GrpcBackendConfig {
  readonly kind: "grpc";
  /** grpc://host:port, or grpcs:// for TLS, and names of DNS (`worker-addresses.ts`). */
  readonly workers: readonly string[];
  readonly dnsMs: number;
  readonly dnsGraceMs: number;
  readonly dnsMaxAddresses: number;
  /** Empty: as the system does. */
  readonly dnsServers: readonly string[];
  /** What the workers call the model; left out: as clients do. */
  readonly model?: string;
  readonly version?: string;
  /** What is sent to workers as `authorization`: never to be shown. */
  readonly authorization?: string;
  readonly maxReplyBytes: number;
  readonly keepAliveMs: number;
  readonly askReady: boolean;
  readonly tls: WorkerTlsConfig;
}

export interface WorkerTlsConfig {
  readonly caFile?: string;
  /** Never without `keyFile`. */
  readonly certFile?: string;
  readonly keyFile?: string;
  readonly serverName?: string;
  readonly reloadMs: number;
}

export interface PythonBackendConfig {
  readonly kind: "python";
  /** `file.py:function`, the file's path made absolute (relative to the config file). */
  readonly function: string;
  readonly workers: number;
  /** The interpreter to run. */
  readonly python: string;
  /** What the function's inputs are: any JSON, or arrays of numbers of this type. */
  readonly inputs: "json" | "int32" | "int64" | "float32";
  /** Comma-separated; worker i sees the i-th, counted round. Left out: every worker sees them all. */
  readonly gpus?: string;
  readonly startTimeoutMs: number;
  readonly maxReplyBytes: number;
}

export interface ModuleBackendConfig {
  readonly kind: "module";
  /** `file.ts` (default export) or `file.ts:name`, the file's path made absolute. */
  readonly function: string;
  readonly workers: number;
  readonly startTimeoutMs: number;
}

export interface SimulatedBackendConfig {
  readonly kind: "simulated";
  readonly workers: number;
  /** A batch of n takes baseMs + n * perItemMs, times 1 + jitter * N(0,1). */
  readonly baseMs: number;
  readonly perItemMs: number;
  readonly jitter: number;
  /** Shares of batches, 0 to 1. */
  readonly errorRate: number;
  readonly hangRate: number;
  readonly shortRate: number;
  readonly slowRate: number;
  /** How many times longer a slow batch takes. */
  readonly slowFactor: number;
  readonly seed: number;
}

/** One thing that is wrong with a config file, or that its author should know. */
export interface Problem {
  readonly file: string;
  /** First is 1; left out where the file as a whole is meant. */
  readonly line?: number;
  readonly column?: number;
  /** The setting, `models[0].maxWaitMs`; "" for the file as a whole. */
  readonly path: string;
  /** What is wrong and what to do, in one line; never a secret. */
  readonly message: string;
}
