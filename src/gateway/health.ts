/**
 * /healthz says that the process lives; /readyz that it wants requests: not while it drains, nor while it cannot store
 * tasks. Neither looks at workers.
 */
import type { Exchange } from "./exchange.ts";
import type { Routes } from "./server.ts";

export function healthRoutes(draining: () => boolean, writable: () => boolean): Routes {
  const ready = (exchange: Exchange): void => {
    exchange.counts = false;
    if (draining()) exchange.send(503, '{"status":"draining"}', ["retry-after", "1"]);
    else if (!writable()) exchange.send(503, '{"status":"unwritable"}', ["retry-after", "1"]);
    else exchange.send(200, '{"status":"ready"}');
  };
  const alive = (exchange: Exchange): void => {
    exchange.counts = false;
    exchange.send(200, '{"status":"ok"}');
  };
  return {
    "/healthz": { GET: alive },
    "/readyz": { GET: ready },
  };
}
