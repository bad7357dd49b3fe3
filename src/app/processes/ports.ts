/** Ports of `ferry serve --processes`: a shared one for clients, and an admin port per process. */
import { once } from "node:events";
import { createServer, type AddressInfo, type Server } from "node:net";
import type { Address, Config, Role } from "../config/config.ts";

/** Configs with one public port and an admin port each. Opens every port briefly: reports errors once, replaces 0. */
export async function giveOutPorts(config: Config, count: number, role: Role): Promise<Config[]> {
  const { listen, admin, grpc } = config;
  checkRange(config, count, role);
  const admins = Array.from({ length: count }, (_, at) => nth(admin.listen, at));
  const open = grpc.listen === undefined ? [listen] : [listen, grpc.listen];
  const wanted = role === "batcher" ? admins : [...admins, ...open];
  const servers: Server[] = [];
  try {
    const ports: number[] = [];
    for (const { host, port } of wanted) {
      const server = createServer();
      server.listen({ host, port, exclusive: true });
      await once(server, "listening");
      servers.push(server);
      ports.push((server.address() as AddressInfo).port);
    }
    return admins.map((address, at) => ({
      ...config,
      listen: { ...listen, port: ports[count] ?? listen.port },
      ...(grpc.listen && {
        grpc: { ...grpc, listen: { ...grpc.listen, port: ports[count + 1] ?? grpc.listen.port } },
      }),
      admin: { ...admin, listen: { ...address, port: ports[at]! } },
    }));
  } finally {
    await Promise.all(servers.map((server) => server.close() && once(server, "close")));
  }
}

function nth({ host, port }: Address, at: number): Address {
  return { host, port: port === 0 ? 0 : port + at };
}

function checkRange({ listen, admin, grpc }: Config, count: number, role: Role): void {
  const first = admin.listen.port;
  const last = first + count - 1;
  if (first === 0) return;
  if (last > 65_535) {
    throw new Error(
      `admin.listen port ${first} is too high: ${count} processes need the ports up to ${last}; choose a lower one`,
    );
  }
  if (role === "batcher") return;
  const among = (port: number | undefined): boolean => port !== undefined && port >= first && port <= last;
  const setting = among(listen.port) ? "listen" : among(grpc.listen?.port) ? "grpc.listen" : undefined;
  if (setting === undefined) return;
  const { port } = setting === "listen" ? listen : grpc.listen!;
  throw new Error(
    `${setting} port ${port} is among the admin ports of ${count} processes, ${first} to ${last}; ` +
      `change ${setting} or admin.listen`,
  );
}

export function withPortsOf({ listen, admin, grpc }: Config, next: Config): Config {
  return {
    ...next,
    listen,
    ...(grpc.listen && { grpc: { ...next.grpc, listen: grpc.listen } }),
    admin: { ...next.admin, listen: admin.listen },
  };
}
