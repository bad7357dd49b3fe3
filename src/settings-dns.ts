/** The settings of workers that are found by a name of DNS (`discovery.ts`); the same for http and grpc. */
import { integer } from "./setting-kinds.ts";

const hour = 3_600_000;

export const dnsTimes = {
  dnsMs: integer("Of `dns://`: the time between two lookups.", {
    default: 5000,
    min: 100,
    max: hour,
    unit: "ms",
  }),
  dnsGraceMs: integer("Of `dns://`: an address that has been missing for so long is drained and removed.", {
    default: 15_000,
    min: 0,
    max: hour,
    unit: "ms",
  }),
};
