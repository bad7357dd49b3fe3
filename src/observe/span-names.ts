/**
 * Every name that a span carries, in one place: `http.*` is stable, `messaging.*` and `gen_ai.*` are still in
 * development and will move. `ferry.*` is ours.
 */
export const SCHEMA_URL = "https://opentelemetry.io/schemas/1.37.0";
export const SCOPE_NAME = "ferry";

export const HTTP_METHOD = "http.request.method";
export const HTTP_RESEND = "http.request.resend_count";
export const HTTP_ROUTE = "http.route";
export const HTTP_STATUS = "http.response.status_code";
export const URL_PATH = "url.path";
export const URL_SCHEME = "url.scheme";
export const SERVER_ADDRESS = "server.address";
export const SERVER_PORT = "server.port";
/** Of a request our error code; of a call the backend's word for how it ended. */
export const ERROR_TYPE = "error.type";

export const MESSAGING_SYSTEM = "messaging.system";
export const MESSAGING_DESTINATION = "messaging.destination.name";
export const MESSAGING_MESSAGE = "messaging.message.id";
export const MESSAGING_OPERATION = "messaging.operation.name";
export const MESSAGING_OPERATION_TYPE = "messaging.operation.type";
export const MESSAGING_COUNT = "messaging.batch.message_count";

export const GEN_AI_OPERATION = "gen_ai.operation.name";
export const GEN_AI_MODEL = "gen_ai.request.model";
export const GEN_AI_PROVIDER = "gen_ai.provider.name";

export const FERRY_MODEL = "ferry.model";
export const FERRY_TIER = "ferry.tier";
export const FERRY_TASK = "ferry.task.id";
export const FERRY_CACHED = "ferry.cached";
export const FERRY_COLLAPSED = "ferry.collapsed";
export const FERRY_ATTEMPT = "ferry.attempt";
export const FERRY_WORKER = "ferry.worker";
export const FERRY_BATCH = "ferry.batch.id";
/** The trace in which the batch is found. */
export const FERRY_BATCH_TRACE = "ferry.batch.trace_id";
export const FERRY_BATCH_REASON = "ferry.batch.reason";
export const FERRY_BATCH_WHY = "ferry.batch.why";
/** Share of `maxBatchSize`, 0 to 1. */
export const FERRY_BATCH_FILL = "ferry.batch.fill";
export const FERRY_BATCH_CALLS = "ferry.batch.calls";

export const SERVICE_NAME = "service.name";
export const SERVICE_VERSION = "service.version";
export const SERVICE_INSTANCE = "service.instance.id";
export const CLOUD_ZONE = "cloud.availability_zone";

/** As numbers, so that nothing of the library is loaded for them. */
export const KIND = { internal: 0, server: 1, client: 2, consumer: 4 } as const;
export const UNSET = 0;
export const ERROR = 2;
