/** What a body says of itself: its media type, charset and encoding; refused where nobody here could read it. */
import { Refusal } from "../core/errors.ts";

interface Headed {
  header(name: string): string | undefined;
}

/** What a browser's form, or a script of any page, may send without being asked. */
const FROM_ANY_PAGE = new Set(["", "text/plain", "application/x-www-form-urlencoded"]);

/** "" among the types: it need not say one. */
export function checkType(exchange: Headed, types: readonly string[]): void {
  const type = exchange.header("content-type") ?? "";
  if (type === "application/json" && exchange.header("content-encoding") === undefined) return;
  const name = type.split(";")[0]!.trim().toLowerCase();
  // A page in a browser may send these to anybody without being asked, but says where it comes from.
  const foreign = FROM_ANY_PAGE.has(name) && exchange.header("origin") !== undefined;
  if (foreign || !types.includes(name)) {
    const others = types
      .slice(1)
      .filter((each) => !FROM_ANY_PAGE.has(each))
      .map((each) => ` or ${each}`)
      .join("");
    throw new Refusal(
      "UNSUPPORTED_MEDIA_TYPE",
      `send Content-Type: application/json${others} (curl: --json)`,
    );
  }
  const charset = /charset="?([^";\s]+)/i.exec(type)?.[1];
  if (charset !== undefined && charset.toLowerCase() !== "utf-8") {
    throw new Refusal("UNSUPPORTED_MEDIA_TYPE", `send the body as UTF-8, not ${charset.slice(0, 32)}`);
  }
  checkUncompressed(exchange);
}

export function checkUncompressed(exchange: Headed): void {
  const encoding = exchange.header("content-encoding");
  if (encoding !== undefined && encoding.toLowerCase() !== "identity") {
    throw new Refusal(
      "UNSUPPORTED_MEDIA_TYPE",
      `send the body without Content-Encoding: ${encoding.slice(0, 32)}`,
    );
  }
}
