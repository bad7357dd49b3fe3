/**
 * `ferry reload`: makes a running Ferry reread the config file it was started with, and prints what changed. -c only
 * locates the admin listener; its file is validated before the request. With `--processes` one process is asked and all
 * reload.
 */
import { plural, urlOf } from "./terminal/banner.ts";
import { AdminClient } from "./admin-client.ts";
import { expectNoWords, type Call, type Command, type Console } from "./command.ts";
import { chooseConfig, configFlag } from "./config-file.ts";
import { parseAdminUrl } from "./dead.ts";

export const reload: Command = {
  summary: "have a running Ferry read its config file again",
  usage: "reload [-c FILE] [--admin URL] [--json]",
  examples: [
    { line: "ferry reload -c ferry.yaml", doc: "what changed, a line each; or why nothing did" },
    { line: "ferry check -c ferry.yaml && ferry reload -c ferry.yaml", doc: "look first" },
  ],
  flags: {
    config: { ...configFlag, doc: "the config file of the running Ferry; default ./ferry.yaml" },
    admin: { type: "string", value: "URL", doc: "another admin listener than the config's" },
    json: { type: "boolean", doc: 'JSON on stdout: {"changed":[…]} or {"problems":[…]}' },
  },

  async run(call: Call, console: Console): Promise<number> {
    expectNoWords(call);
    const chosen = chooseConfig(call, console, "nobody was asked to reload");
    if (chosen === undefined) return 1;
    const { admin, tls } = chosen.config;
    const other = call.text("admin");
    const base = other === undefined ? urlOf(admin.listen, admin.tls) : parseAdminUrl(other);
    const client = new AdminClient(base, admin.token, "reload", tls?.certFile);
    const outcome = await client.reload();
    const { changed, problems = [] } = outcome;
    if (call.is("json")) console.out(`${JSON.stringify(outcome)}\n`);
    else {
      for (const each of changed ?? []) console.out(`${each}\n`);
      for (const each of problems) console.err(`${each}\n`);
    }
    if (changed === undefined) {
      console.err(`${plural(problems.length, "problem")}, nothing was changed.\n`);
      return 1;
    }
    if (changed.length === 0)
      console.err("nothing in the config changed; keys and certificates were read again\n");
    return 0;
  },
};
