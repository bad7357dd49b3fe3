/** Ports of `ferry serve --processes`. */
import { once } from "node:events";
import { createServer, type AddressInfo, type Server } from "node:net";
import type { Config } from "../config/config.ts";

/** Opens every port briefly: an error is reported once, and 0 becomes a port that a restarted process finds again. */
export async function choosePorts(config: Config): Promise<Config> {
  const { listen, admin, grpc } = config;
  const wanted = [listen, admin.listen, ...(grpc.listen === undefined ? [] : [grpc.listen])];
  const servers: Server[] = [];
  try {
    for (const { host, port } of wanted) {
      const server = createServer();
      server.listen({ host, port, exclusive: true });
      await once(server, "listening");
      servers.push(server);
    }
    const [api, internal, tensors] = servers.map((server) => (server.address() as AddressInfo).port);
    return {
      ...config,
      listen: { ...listen, port: api! },
      admin: { ...admin, listen: { ...admin.listen, port: internal! } },
      ...(grpc.listen && { grpc: { ...grpc, listen: { ...grpc.listen, port: tensors! } } }),
    };
  } finally {
    await Promise.all(servers.map((server) => server.close() && once(server, "close")));
  }
}

export function withPortsOf({ listen, admin, grpc }: Config, next: Config): Config {
  return {
    ...next,
    listen,
    ...(grpc.listen && { grpc: { ...next.grpc, listen: grpc.listen } }),
    admin: { ...next.admin, listen: admin.listen },
  };
}
