/** The settings of workers that are found by a name of DNS (`discovery.ts`); the same for http and grpc. */
import { isIP } from "node:net";
import { parseAddress } from "./setting-addresses.ts";
import { integer, leaf, list } from "./setting-kinds.ts";

const hour = 3_600_000;
const example = "127.0.0.1:8600";

/** As `node:dns` takes it: an address, since a name would have to be looked up first. */
const dnsServer = leaf<string>({
  kind: "address:port",
  doc: "One server.",
  bounds: "port 1 to 65,535; left out: 53",
  example,
  read({ value }) {
    const written = String(value);
    if (isIP(written) !== 0) return { value: written };
    const { host, port } = parseAddress(written) ?? { host: "", port: 0 };
    if (isIP(host) !== 0 && port > 0)
      return { value: isIP(host) === 6 ? `[${host}]:${port}` : `${host}:${port}` };
    return { wrong: `is not an address; write one like ${example}, 10.0.0.2 or [::1]:53` };
  },
});

export const dnsRules = {
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
  dnsMaxAddresses: integer(
    "Of `dns://`: the most addresses of one name; more are not used, and it is told.",
    {
      default: 1024,
      min: 1,
      max: 65_536,
    },
  ),
  dnsServers: list(
    "Of `dns://`: who is asked instead of the system's servers, such as a Consul agent; no others are then.",
    dnsServer,
    { min: 0, max: 8 },
  ),
};
