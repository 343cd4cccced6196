// The schema at /openapi.json, as a page to read: what can be asked, with which fields, and what of
// each. Drawn by the server's own scripts, so that it is there without a network too.

import { byId, el } from "./dom.js";

const LIMITS = {
  minimum: (n) => `from ${n}`, exclusiveMinimum: (n) => `above ${n}`,
  maximum: (n) => `to ${n}`, exclusiveMaximum: (n) => `below ${n}`,
  minLength: (n) => (n > 1 ? `at least ${n} characters` : "not empty"), maxLength: (n) => `at most ${n} characters`,
  minItems: (n) => `at least ${n}`, maxItems: (n) => `at most ${n}`,
  pattern: (text) => `like ${text}`, default: (value) => `by default ${JSON.stringify(value)}`,
};

function draw(schema) {
  byId("version").textContent = `${schema.info.title} ${schema.info.version}`;
  const records = schema.components.schemas;
  const tags = new Map();
  for (const one of operations(schema)) tags.set(one.tags[0], [...(tags.get(one.tags[0]) ?? []), one]);
  byId("docs").replaceChildren(
    el("h2", { text: "The API" }),
    el("p", { class: "small", text: schema.info.description }),
    ...[...tags].flatMap(([tag, some]) => [el("h3", { text: tag }), ...some.map(operation)]),
    el("h3", { text: "records" }),
    ...Object.keys(records).sort().map((name) => record(name, records[name])));
  openNamed();
}

function operations(schema) {
  return Object.entries(schema.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, about]) => ({ path, method, ...about })));
}

function operation(one) {
  const content = Object.entries(one.requestBody?.content ?? {});
  const fails = Object.entries(one.responses).filter(([status]) => status >= "400");
  return el("details", { id: one.operationId },
    el("summary", {}, el("code", { text: `${one.method.toUpperCase()} ${one.path}` })),
    el("p", { text: one.description }),
    one.parameters ? fields("In the address", one.parameters.map((p) => [p.name, p.schema, p.required])) : null,
    ...content.map(([type, { schema }]) => el("div", {}, el("p", { class: "small" }, `Body, ${type}: `, ...kind(schema)),
      schema.properties ? fields("Fields", owned(schema)) : null)),
    el("ul", { class: "small" }, ...fails.map(([status, { description }]) => el("li", { text: `${status}: ${description}` }))));
}

function record(name, schema) {
  return el("details", { id: `record-${name}` }, el("summary", {}, el("code", { text: shown(name) })),
    schema.description ? el("p", { text: schema.description }) : null,
    schema.properties ? fields("Fields", owned(schema)) : el("p", {}, ...kind(schema)));
}

const owned = ({ properties, required = [] }) =>
  Object.entries(properties).map(([name, schema]) => [name, schema, required.includes(name)]);

function fields(title, rows) {
  return el("div", { class: "scroll" }, el("table", { "aria-label": title }, ...rows.map(([name, schema, required]) => el("tr", {},
    el("th", { scope: "row" }, el("code", { text: name }), required ? el("span", { class: "small", text: " required" }) : null),
    el("td", {}, ...kind(schema), schema.description ? el("span", { class: "gloss", text: schema.description }) : null)))));
}

/** What a value may be, as text and links; null, which means leaving it out, is not said. */
function kind(schema) {
  if (schema.$ref) return [link(schema.$ref.split("/").at(-1))];
  const among = (schema.anyOf ?? schema.oneOf ?? []).filter((one) => one.type !== "null");
  if (among.length) return joined(among.map(kind), " or ");
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" or ")];
  if (schema.const !== undefined) return [JSON.stringify(schema.const)];
  const inner = schema.items ? [" of ", ...kind(schema.items)] : [];
  return [schema.type ?? "anything", ...inner, ...limits(schema)];
}

function limits(schema) {
  return Object.entries(LIMITS).filter(([name]) => schema[name] !== undefined && schema[name] !== null)
    .map(([name, words]) => `, ${words(schema[name])}`);
}

const joined = (lists, between) => lists.flatMap((list, spot) => (spot ? [between, ...list] : list));
const shown = (name) => name.split("__").at(-1);
const link = (name) => el("a", { href: `#record-${name}`, text: shown(name) });

/** A link to a record opens it. */
function openNamed() {
  const target = location.hash && byId(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  target.open = true;
  target.scrollIntoView();
}

addEventListener("hashchange", openNamed);
try {
  draw(await (await fetch("openapi.json")).json());
} catch (error) {
  byId("docs").replaceChildren(el("p", { class: "trouble", role: "alert", text: `The schema cannot be read: ${error.message}` }));
}
