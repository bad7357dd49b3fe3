/**
 * Runs Redis's Lua scripts in this process: a compiler of Lua 5.1 to JavaScript, and the parts of its libraries that
 * scripts of Ferry use. `lua.test.ts` compares it with what a real server computes.
 *
 * A Lua string is a JavaScript string with one character per byte (latin1); nil is undefined; a function takes its
 * arguments and returns the array of its results. Not there: goto, metatables, coroutines, %b and %f in patterns.
 */
import { compileFunction } from "node:vm";
import { library, LuaError, Table, type LuaFunction, type LuaValue } from "./lua-library.ts";

export type Script = (globals: Record<string, LuaValue>) => LuaValue[];

/** Throws a SyntaxError, or a `LuaError` when it is run. */
export function compile(source: string): Script {
  const body = new Compiler(source).program();
  const run = compileFunction(`"use strict";\n${body}`, ["$", "$G"]) as (
    runtime: typeof RUNTIME,
    globals: Record<string, LuaValue>,
  ) => LuaValue[] | undefined;
  return (globals) => run(RUNTIME, { ...library, ...globals }) ?? [];
}

// ── what compiled code calls ─────────────────────────────────────────────────────────────────────────

function typeName(value: LuaValue): string {
  return String((library["type"] as LuaFunction)(value)[0]);
}

function number(value: LuaValue): number {
  if (typeof value === "number") return value;
  const converted = typeof value === "string" ? (library["tonumber"] as LuaFunction)(value)[0] : undefined;
  if (converted === undefined)
    throw new LuaError(`attempt to perform arithmetic on a ${typeName(value)} value`);
  return converted as number;
}

function ordered(one: LuaValue, other: LuaValue): void {
  if (typeof one === typeof other && (typeof one === "number" || typeof one === "string")) return;
  throw new LuaError(`attempt to compare ${typeName(one)} with ${typeName(other)}`);
}

const RUNTIME = {
  Table,
  number,
  truthy: (value: LuaValue): boolean => value !== undefined && value !== false,
  first: (values: LuaValue[] | undefined): LuaValue => values?.[0],
  and: (value: LuaValue, other: () => LuaValue): LuaValue =>
    value === undefined || value === false ? value : other(),
  or: (value: LuaValue, other: () => LuaValue): LuaValue =>
    value === undefined || value === false ? other() : value,
  modulo: (one: LuaValue, other: LuaValue): number => {
    const [dividend, divisor] = [number(one), number(other)];
    return dividend - Math.floor(dividend / divisor) * divisor;
  },
  less: (one: LuaValue, other: LuaValue): boolean => {
    ordered(one, other);
    return one! < other!;
  },
  atMost: (one: LuaValue, other: LuaValue): boolean => {
    ordered(one, other);
    return one! <= other!;
  },
  concat: (one: LuaValue, other: LuaValue): string => {
    for (const value of [one, other]) {
      if (typeof value !== "string" && typeof value !== "number")
        throw new LuaError(`attempt to concatenate a ${typeName(value)} value`);
    }
    const text = library["tostring"] as LuaFunction;
    return String(text(one)[0]) + String(text(other)[0]);
  },
  length: (value: LuaValue): number => {
    if (typeof value === "string") return value.length;
    if (value instanceof Table) return value.length;
    throw new LuaError(`attempt to get length of a ${typeName(value)} value`);
  },
  get: (table: LuaValue, key: LuaValue): LuaValue => {
    if (table instanceof Table) return table.get(key);
    if (typeof table === "string") return (library["string"] as Table).get(key);
    throw new LuaError(`attempt to index a ${typeName(table)} value (key ${String(key)})`);
  },
  set: (table: LuaValue, key: LuaValue, value: LuaValue): void => {
    if (!(table instanceof Table)) throw new LuaError(`attempt to index a ${typeName(table)} value`);
    table.set(key, value);
  },
  callee: (value: LuaValue, name: string): LuaFunction => {
    if (typeof value !== "function")
      throw new LuaError(`attempt to call ${name} (a ${typeName(value)} value)`);
    return value;
  },
  global: (globals: Record<string, LuaValue>, name: string): LuaValue => {
    if (!Object.hasOwn(globals, name))
      throw new LuaError(`Script attempted to access nonexistent global variable '${name}'`);
    return globals[name];
  },
};

// ── words ────────────────────────────────────────────────────────────────────────────────────────────

interface Token {
  readonly kind: "name" | "number" | "string" | "symbol" | "keyword" | "end";
  readonly text: string;
  readonly line: number;
}

const KEYWORDS = new Set(
  (
    "and break do else elseif end false for function if in local nil not or repeat return then true until " +
    "while"
  ).split(" "),
);
const WORD =
  /\s+|--\[\[[^]*?\]\]|--[^\n]*|(?<name>[A-Za-z_]\w*)|(?<number>0[xX][0-9a-fA-F]+|\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)|(?<string>"(?:\\[^]|[^"\\])*"|'(?:\\[^]|[^'\\])*'|\[\[[^]*?\]\])|(?<symbol>\.\.\.|\.\.|==|~=|<=|>=|[-+*/%^#<>=(){}[\];:,.])/y;
const ESCAPES: Readonly<Record<string, string>> = {
  n: "\n",
  r: "\r",
  t: "\t",
  a: "\x07",
  b: "\b",
  f: "\f",
  v: "\v",
};

function stringOf(text: string): string {
  if (text.startsWith("[[")) return text.slice(2, -2).replace(/^\n/, "");
  return text
    .slice(1, -1)
    .replaceAll(/\\(\d{1,3}|[^])/g, (_, said: string) =>
      /\d/.test(said) ? String.fromCharCode(Number(said)) : (ESCAPES[said] ?? said),
    );
}

function tokensOf(source: string): Token[] {
  const tokens: Token[] = [];
  let line = 1;
  // Bytes, as Lua sees them.
  const text = Buffer.from(source.replace(/^#![^\n]*/, "")).toString("latin1");
  for (WORD.lastIndex = 0; WORD.lastIndex < text.length;) {
    const from = WORD.lastIndex;
    const found = WORD.exec(text);
    if (found === null) throw new SyntaxError(`Lua, line ${line}: ${text.slice(from, from + 20)}`);
    for (const [kind, word] of Object.entries(found.groups!)) {
      if (word === undefined) continue;
      if (kind === "string") tokens.push({ kind, text: stringOf(word), line });
      else tokens.push({ kind: KEYWORDS.has(word) ? "keyword" : (kind as Token["kind"]), text: word, line });
    }
    line += found[0].split("\n").length - 1;
  }
  tokens.push({ kind: "end", text: "<end>", line });
  return tokens;
}

// ── sentences ────────────────────────────────────────────────────────────────────────────────────────

/** JavaScript for an expression; `many`: it is an array of values, as a call or `...` gives. */
interface Expression {
  readonly code: string;
  readonly many?: boolean;
  /** Where it may stand on the left of an assignment. */
  readonly assign?: (value: string) => string;
}

const LEFT: Readonly<Record<string, number>> = {
  or: 1,
  and: 2,
  "<": 3,
  ">": 3,
  "<=": 3,
  ">=": 3,
  "~=": 3,
  "==": 3,
  "..": 5,
  "+": 6,
  "-": 6,
  "*": 7,
  "/": 7,
  "%": 7,
  "^": 10,
};
const RIGHT: Readonly<Record<string, number>> = { "..": 4, "^": 9 };
const UNARY = 8;

function binary(operator: string, one: string, other: string): string {
  switch (operator) {
    case "or":
    case "and":
      return `$.${operator}(${one}, () => ${other})`;
    case "<":
      return `$.less(${one}, ${other})`;
    case ">":
      return `$.less(${other}, ${one})`;
    case "<=":
      return `$.atMost(${one}, ${other})`;
    case ">=":
      return `$.atMost(${other}, ${one})`;
    case "==":
      return `(${one} === ${other})`;
    case "~=":
      return `(${one} !== ${other})`;
    case "..":
      return `$.concat(${one}, ${other})`;
    case "%":
      return `$.modulo(${one}, ${other})`;
    case "^":
      return `($.number(${one}) ** $.number(${other}))`;
    default:
      return `($.number(${one}) ${operator} $.number(${other}))`;
  }
}

class Compiler {
  readonly #tokens: Token[];
  #at = 0;
  /** Local names, innermost last, each with its name in JavaScript. */
  #scopes: Map<string, string>[] = [];
  #names = 0;

  constructor(source: string) {
    this.#tokens = tokensOf(source);
  }

  program(): string {
    const code = this.#block();
    if (this.#token.kind !== "end") this.#fail();
    return code;
  }

  get #token(): Token {
    return this.#tokens[this.#at]!;
  }

  #fail(wanted = ""): never {
    const { text, line } = this.#token;
    throw new SyntaxError(`Lua, line ${line}: unexpected ${text}${wanted && `, not ${wanted}`}`);
  }

  #is(text: string): boolean {
    const { kind } = this.#token;
    return this.#token.text === text && (kind === "symbol" || kind === "keyword");
  }

  #takes(text: string): boolean {
    if (!this.#is(text)) return false;
    this.#at++;
    return true;
  }

  #expect(text: string): void {
    if (!this.#takes(text)) this.#fail(text);
  }

  #name(): string {
    if (this.#token.kind !== "name") this.#fail("a name");
    return this.#tokens[this.#at++]!.text;
  }

  /** In JavaScript; visible from here on. */
  #declare(name: string): string {
    const own = `${name}$${++this.#names}`;
    this.#scopes.at(-1)!.set(name, own);
    return own;
  }

  #block(declare?: () => string): string {
    this.#scopes.push(new Map());
    let code = declare?.() ?? "";
    while (this.#token.kind !== "end" && !["end", "else", "elseif", "until"].some((word) => this.#is(word))) {
      const last = this.#is("return") || this.#is("break");
      code += `${this.#statement()}\n`;
      this.#takes(";");
      if (last) break;
    }
    this.#scopes.pop();
    return code;
  }

  #statement(): string {
    if (this.#takes("local")) return this.#takes("function") ? this.#localFunction() : this.#local();
    if (this.#takes("if")) return this.#if();
    if (this.#takes("while")) {
      const condition = this.#condition();
      this.#expect("do");
      return `while (${condition}) {\n${this.#ended()}}`;
    }
    if (this.#takes("do")) return `{\n${this.#ended()}}`;
    if (this.#takes("for")) return this.#for();
    if (this.#takes("repeat")) return this.#repeat();
    if (this.#takes("function")) this.#fail("a local function");
    if (this.#takes("return")) return this.#return();
    if (this.#takes("break")) return "break;";
    return this.#assignmentOrCall();
  }

  #ended(declare?: () => string): string {
    const code = this.#block(declare);
    this.#expect("end");
    return code;
  }

  #condition(): string {
    return `$.truthy(${this.#expression()})`;
  }

  #localFunction(): string {
    const own = this.#declare(this.#name());
    return `let ${own}; ${own} = ${this.#function()};`;
  }

  #local(): string {
    const names = [this.#name()];
    while (this.#takes(",")) names.push(this.#name());
    const values = this.#takes("=") ? this.#expressions() : [];
    // Declared after the values, which may name outer variables of the same name.
    if (names.length === 1 && values.length <= 1) {
      const value = values[0] === undefined ? "undefined" : single(values[0]);
      return `let ${this.#declare(names[0]!)} = ${value};`;
    }
    const list = listOf(values);
    return `let [${names.map((name) => this.#declare(name)).join(", ")}] = ${list};`;
  }

  #if(): string {
    let code = `if (${this.#condition()}) {\n`;
    this.#expect("then");
    code += this.#block();
    for (;;) {
      if (this.#takes("elseif")) {
        code += `} else if (${this.#condition()}) {\n`;
        this.#expect("then");
        code += this.#block();
      } else if (this.#takes("else")) code += `} else {\n${this.#block()}`;
      else break;
    }
    this.#expect("end");
    return `${code}}`;
  }

  #for(): string {
    const names = [this.#name()];
    const id = ++this.#names;
    if (this.#takes("=")) {
      const [from, to, step] = this.#expressions().map(single);
      this.#expect("do");
      const body = this.#ended(() => `let ${this.#declare(names[0]!)} = $i${id};\n`);
      return (
        `for (let $i${id} = $.number(${from}), $to${id} = $.number(${to}), $by${id} = $.number(${step ?? 1}); ` +
        `$by${id} > 0 ? $i${id} <= $to${id} : $i${id} >= $to${id}; $i${id} += $by${id}) {\n${body}}`
      );
    }
    while (this.#takes(",")) names.push(this.#name());
    this.#expect("in");
    const values = listOf(this.#expressions());
    this.#expect("do");
    const body = this.#ended(() => {
      const [first, ...rest] = names.map((name) => this.#declare(name));
      return (
        `let [${[first, ...rest].join(", ")}] = $next${id}($state${id}, $key${id}) ?? [];\n` +
        `if (${first} === undefined) break;\n$key${id} = ${first};\n`
      );
    });
    return `{ let [$next${id}, $state${id}, $key${id}] = ${values};\nwhile (true) {\n${body}} }`;
  }

  #repeat(): string {
    // The condition may name variables of the block.
    this.#scopes.push(new Map());
    let code = "while (true) {\n";
    while (!this.#is("until")) {
      code += `${this.#statement()}\n`;
      this.#takes(";");
    }
    this.#expect("until");
    code += `if (${this.#condition()}) break;\n}`;
    this.#scopes.pop();
    return code;
  }

  #return(): string {
    const ends = ["end", "else", "elseif", "until", ";"].some((word) => this.#is(word));
    if (ends || this.#token.kind === "end") return "return [];";
    const values = this.#expressions();
    return `return ${listOf(values)};`;
  }

  #assignmentOrCall(): string {
    const left = [this.#suffixed()];
    if (left[0]!.many === true && !this.#is(",") && !this.#is("=")) return `${left[0]!.code};`;
    while (this.#takes(",")) left.push(this.#suffixed());
    this.#expect("=");
    const values = this.#expressions();
    for (const { assign } of left) if (assign === undefined) this.#fail("something to assign to");
    if (left.length === 1 && values.length === 1) return `${left[0]!.assign!(single(values[0]!))};`;
    const id = ++this.#names;
    const assignments = left.map(({ assign }, at) => `${assign!(`$v${id}[${at}]`)};`);
    return `{ const $v${id} = ${listOf(values)}; ${assignments.join(" ")} }`;
  }

  #expressions(): Expression[] {
    const list = [this.#any(0)];
    while (this.#takes(",")) list.push(this.#any(0));
    return list;
  }

  #expression(): string {
    return single(this.#any(0));
  }

  #any(limit: number): Expression {
    let left = this.#unary();
    for (;;) {
      const { text, kind } = this.#token;
      const strength = kind === "symbol" || kind === "keyword" ? LEFT[text] : undefined;
      if (strength === undefined || strength <= limit) return left;
      this.#at++;
      const right = this.#any(RIGHT[text] ?? strength);
      left = { code: binary(text, single(left), single(right)) };
    }
  }

  #unary(): Expression {
    if (this.#takes("not")) return { code: `!$.truthy(${single(this.#any(UNARY))})` };
    if (this.#takes("-")) return { code: `(-$.number(${single(this.#any(UNARY))}))` };
    if (this.#takes("#")) return { code: `$.length(${single(this.#any(UNARY))})` };
    return this.#simple();
  }

  #simple(): Expression {
    const { kind, text } = this.#token;
    if (kind === "number" || kind === "string") {
      this.#at++;
      return { code: kind === "number" ? String(Number(text)) : JSON.stringify(text) };
    }
    for (const [word, code] of [
      ["nil", "undefined"],
      ["true", "true"],
      ["false", "false"],
    ] as const) {
      if (this.#takes(word)) return { code };
    }
    if (this.#takes("...")) return { code: "$rest", many: true };
    if (this.#takes("function")) return { code: this.#function() };
    if (this.#is("{")) return { code: this.#table() };
    return this.#suffixed();
  }

  #function(): string {
    this.#expect("(");
    this.#scopes.push(new Map());
    const parameters: string[] = [];
    while (!this.#takes(")")) {
      parameters.push(this.#takes("...") ? "...$rest" : this.#declare(this.#name()));
      this.#takes(",");
    }
    const body = this.#ended();
    this.#scopes.pop();
    return `((${parameters.join(", ")}) => {\n${body}return [];\n})`;
  }

  #table(): string {
    this.#expect("{");
    const items: Expression[] = [];
    const fields: string[] = [];
    while (!this.#takes("}")) {
      const next = this.#tokens[this.#at + 1]!;
      if (this.#takes("[")) {
        const key = this.#expression();
        this.#expect("]");
        this.#expect("=");
        fields.push(`[${key}, ${this.#expression()}]`);
      } else if (this.#token.kind === "name" && next.kind === "symbol" && next.text === "=") {
        const key = this.#name();
        this.#expect("=");
        fields.push(`[${JSON.stringify(key)}, ${this.#expression()}]`);
      } else items.push(this.#any(0));
      if (!this.#takes(",")) this.#takes(";");
    }
    return `new $.Table(${listOf(items)}, [${fields.join(", ")}])`;
  }

  /** A name or a parenthesis with what follows it: indices and calls. */
  #suffixed(): Expression {
    let left: Expression;
    if (this.#takes("(")) {
      left = { code: `(${this.#expression()})` };
      this.#expect(")");
    } else left = this.#variable(this.#name());
    for (;;) {
      const said = single(left);
      if (this.#takes(".")) left = field(said, JSON.stringify(this.#name()));
      else if (this.#takes("[")) {
        left = field(said, this.#expression());
        this.#expect("]");
      } else if (this.#takes(":")) {
        const name = JSON.stringify(this.#name());
        const id = `$self${++this.#names}`;
        const call = `$.callee($.get(${id}, ${name}), ${name})(${[id, ...this.#arguments()].join(", ")})`;
        left = { code: `((${id}) => ${call})(${said})`, many: true };
      } else if (this.#is("(") || this.#is("{") || this.#token.kind === "string") {
        const name = JSON.stringify(said.slice(0, 60));
        left = { code: `$.callee(${said}, ${name})(${this.#arguments().join(", ")})`, many: true };
      } else return left;
    }
  }

  #variable(name: string): Expression {
    const scope = this.#scopes.findLast((each) => each.has(name));
    if (scope === undefined) return { code: `$.global($G, ${JSON.stringify(name)})` };
    const own = scope.get(name)!;
    return { code: own, assign: (value) => `${own} = ${value}` };
  }

  #arguments(): string[] {
    if (this.#token.kind === "string") return [JSON.stringify(this.#tokens[this.#at++]!.text)];
    if (this.#is("{")) return [this.#table()];
    this.#expect("(");
    if (this.#takes(")")) return [];
    const list = spread(this.#expressions());
    this.#expect(")");
    return list;
  }
}

function field(table: string, key: string): Expression {
  return { code: `$.get(${table}, ${key})`, assign: (value) => `$.set(${table}, ${key}, ${value})` };
}

function single({ code, many }: Expression): string {
  if (many !== true) return code;
  return code === "$rest" ? "$rest[0]" : `$.first(${code})`;
}

/** All but the last give one value each. */
function spread(expressions: readonly Expression[]): string[] {
  return expressions.map((each, at) =>
    each.many === true && at === expressions.length - 1 ? `...(${each.code} ?? [])` : single(each),
  );
}

function listOf(expressions: readonly Expression[]): string {
  const [only] = expressions;
  if (expressions.length === 1 && only!.many === true) return `(${only!.code} ?? [])`;
  return `[${spread(expressions).join(", ")}]`;
}
