/**
 * From a name to its addresses, A and AAAA.
 *
 * DNS servers are asked first, without libc and its threads, and their word counts where they know the name: an empty
 * answer means that it has no address now. Where they do not (a name of /etc/hosts, one that a search domain completes,
 * as `gpu.default.svc` in Kubernetes, no server at all), the system is asked as any other program would ask it. Rejects
 * when neither knows: that the name is unknown may be a fault of DNS, and nobody should lose workers to it.
 */
import { lookup, Resolver } from "node:dns/promises";

/** Rejects with a `code` when nothing could be learned. `servers`: who is asked, and nobody else; empty: as above. */
export type Resolve = (hostname: string, servers?: readonly string[]) => Promise<readonly string[]>;

const TIMEOUT_MS = 2000;
const TRIES = 2;

export const systemResolve: Resolve = async (hostname, servers = []) => {
  const resolver = new Resolver({ timeout: TIMEOUT_MS, tries: TRIES });
  if (servers.length > 0) {
    resolver.setServers(servers);
    const [all4, all6] = await Promise.all([
      resolver.resolve4(hostname).catch(emptyOrThrow),
      resolver.resolve6(hostname).catch(emptyOrThrow),
    ]);
    return [...all4, ...all6];
  }
  const answers = await Promise.all([
    resolver.resolve4(hostname).catch(emptyWhereKnown),
    resolver.resolve6(hostname).catch(emptyWhereKnown),
  ]);
  const [v4, v6] = answers;
  // Half an answer would look as if the other half had gone.
  if (v4 !== undefined && v6 !== undefined) return [...v4, ...v6];
  const found = await lookup(hostname, { all: true });
  return found.map(({ address }) => address);
};

/** The name is there, and has no address of this kind; undefined: nothing is known. */
function emptyWhereKnown(error: unknown): readonly string[] | undefined {
  return (error as NodeJS.ErrnoException).code === "ENODATA" ? [] : undefined;
}

function emptyOrThrow(error: unknown): readonly string[] {
  const empty = emptyWhereKnown(error);
  if (empty === undefined) throw error;
  return empty;
}
