// Checks a value against a JSON schema: the keywords that requests use. Returns [path, what is wrong] pairs.

const MAX_PROBLEMS = 20;
const MAX_DEPTH = 64;

export function checkSchema(value, schema) {
  const problems = [];
  try {
    check(value, schema, "$", { root: schema, problems, depth: 0 });
  } catch (error) {
    problems.push(["$", `the schema cannot be used: ${error.message}`]);
  }
  return problems;
}

function typeOf(value) {
  if (value === null) return "null";
  if (Array.isArray(value)) return "array";
  return typeof value === "number" && Number.isInteger(value) ? "integer" : typeof value;
}

const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
const short = (value) => {
  const text = JSON.stringify(value) ?? "nothing";
  return text.length > 60 ? `${text.slice(0, 60)}…` : text;
};

function check(value, schema, path, context) {
  const { problems, root } = context;
  if (problems.length >= MAX_PROBLEMS || schema === true || schema == null) return;
  if (context.depth > MAX_DEPTH) throw new Error("its references are nested too deeply");
  const say = (what) => problems.length < MAX_PROBLEMS && problems.push([path, what]);
  if (schema === false) return void say("nothing is allowed here");
  const inner = { ...context, depth: context.depth + 1 };
  if (schema.$ref) check(value, resolve(root, schema.$ref), path, inner);
  const type = typeOf(value);
  const wanted = [schema.type ?? []].flat();
  if (wanted.length && !wanted.includes(type) && !(type === "integer" && wanted.includes("number")))
    return void say(`is ${type}; must be ${wanted.join(" or ")}`);
  if (schema.enum && !schema.enum.some((one) => same(one, value))) say(`is ${short(value)}; must be one of ${short(schema.enum)}`);
  if ("const" in schema && !same(schema.const, value)) say(`is ${short(value)}; must be ${short(schema.const)}`);
  if (typeof value === "number") checkNumber(value, schema, say);
  if (type === "string") checkString(value, schema, say);
  if (type === "array") checkArray(value, schema, path, inner, say);
  if (type === "object") checkObject(value, schema, path, inner, say);
  for (const part of schema.allOf ?? []) check(value, part, path, inner);
  const passes = (part) => {
    const found = [];
    check(value, part, path, { ...inner, problems: found });
    return !found.length;
  };
  if (schema.anyOf && !schema.anyOf.some(passes)) say("matches none of anyOf");
  if (schema.oneOf && schema.oneOf.filter(passes).length !== 1) say("must match exactly one of oneOf");
  if (schema.not && passes(schema.not)) say("matches what it must not");
}

function resolve(root, ref) {
  if (!ref.startsWith("#")) throw new Error(`it refers to ${ref}`);
  const names = ref.slice(1).split("/").slice(1).map((name) => decodeURIComponent(name).replaceAll("~1", "/").replaceAll("~0", "~"));
  const found = names.reduce((schema, name) => (schema && Object.hasOwn(schema, name) ? schema[name] : undefined), root);
  if (found === undefined) throw new Error(`${ref} is not in it`);
  return found;
}

function checkNumber(value, schema, say) {
  if (value < schema.minimum) say(`is ${value}; the minimum is ${schema.minimum}`);
  if (value > schema.maximum) say(`is ${value}; the maximum is ${schema.maximum}`);
  if (value <= schema.exclusiveMinimum) say(`is ${value}; must be above ${schema.exclusiveMinimum}`);
  if (value >= schema.exclusiveMaximum) say(`is ${value}; must be below ${schema.exclusiveMaximum}`);
  const ratio = value / schema.multipleOf;
  if (schema.multipleOf && Math.abs(ratio - Math.round(ratio)) > 1e-9) say(`is ${value}; must be a multiple of ${schema.multipleOf}`);
}

function checkString(value, schema, say) {
  const length = [...value].length;
  if (length < schema.minLength) say(`has ${length} characters; the minimum is ${schema.minLength}`);
  if (length > schema.maxLength) say(`has ${length} characters; the maximum is ${schema.maxLength}`);
  if (schema.pattern && !new RegExp(schema.pattern, "u").test(value)) say(`does not match ${schema.pattern}`);
}

function checkArray(value, schema, path, context, say) {
  if (value.length < schema.minItems) say(`has ${value.length} items; the minimum is ${schema.minItems}`);
  if (value.length > schema.maxItems) say(`has ${value.length} items; the maximum is ${schema.maxItems}`);
  if (schema.uniqueItems && new Set(value.map((item) => JSON.stringify(item))).size < value.length) say("has equal items");
  const first = schema.prefixItems ?? [];
  value.forEach((item, i) => check(item, i < first.length ? first[i] : schema.items, `${path}[${i}]`, context));
}

function checkObject(value, schema, path, context, say) {
  for (const name of schema.required ?? []) if (!Object.hasOwn(value, name)) say(`lacks ${short(name)}`);
  const properties = schema.properties ?? {};
  const patterns = Object.entries(schema.patternProperties ?? {});
  for (const [name, part] of Object.entries(value)) {
    const at = `${path}.${name}`;
    const known = Object.hasOwn(properties, name);
    if (known) check(part, properties[name], at, context);
    const matching = patterns.filter(([pattern]) => new RegExp(pattern, "u").test(name));
    for (const [, one] of matching) check(part, one, at, context);
    if (known || matching.length || schema.additionalProperties === undefined) continue;
    if (schema.additionalProperties === false) context.problems.push([at, "is not in the schema"]);
    else check(part, schema.additionalProperties, at, context);
  }
}

// The value of a JSON text, or what is wrong with it and where.
export function readJSON(text) {
  try {
    return { value: JSON.parse(text) };
  } catch (error) {
    const found = /position (\d+)/.exec(error.message);
    if (!found) return { problem: error.message };
    const before = text.slice(0, Number(found[1])).split("\n");
    const message = error.message.replace(/ (in JSON )?at position.*/, "");
    return { problem: `line ${before.length}, column ${before.at(-1).length + 1}: ${message}` };
  }
}
