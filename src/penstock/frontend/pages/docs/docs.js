// The API's page: shows /openapi.json.
import { html, render, useEffect, useState } from "../vendor/preact.js";
import { fetchJSON, readKey } from "../shared/api.js";
import { Code } from "../shared/code.js";
import { CopyButton, Header, KeyDialog } from "../shared/shell.js";

const TITLES = { openai: "OpenAI", pages: "Pages and server", probes: "Probes and metrics", anthropic: "Anthropic", ollama: "Ollama", tgi: "Text Generation Inference", kserve: "KServe v2 and Triton", rerank: "Rerank, score and classify" };
const METHODS = ["get", "post", "put", "patch", "delete"];

function operations(spec) {
  return Object.entries(spec.paths).flatMap(([path, methods]) =>
    METHODS.filter((method) => methods[method]).map((method) => ({ path, method, ...methods[method] })),
  );
}

const resolve = (spec, schema) => {
  const name = schema?.$ref?.split("/").at(-1);
  return name ? [spec.components.schemas[name] ?? {}, name] : [schema ?? {}, ""];
};

// A schema's type in few words.
function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map(typeOf).filter((name) => name !== "null").join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.filter((value) => value !== null).map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items) : "anything"}`;
  if (schema.type === "object" && schema.additionalProperties?.type) return `object of ${typeOf(schema.additionalProperties)}`;
  return [schema.type ?? "anything"].flat().join(" or ");
}

// The range of a number's values, as text after its type.
function rangeOf({ minimum, maximum }) {
  if (minimum === undefined) return "";
  return maximum < 1e6 ? `, ${minimum} to ${maximum}` : minimum > -1e6 && `, ${minimum} or more`;
}

// A default that is a value. Of others, the description says what holds.
const defaultOf = ({ default: value }) => (value === undefined || value === null || value === "" ? "" : `, default ${JSON.stringify(value)}`);

// Returns [name, schema] for each object in a schema that lists its fields.
function objects(spec, schema, name) {
  const [found, own] = resolve(spec, schema);
  if (found.properties) return [[found.properties.type?.const ?? (own || name), found]];
  return [found.items, ...(found.anyOf ?? [])].filter(Boolean).flatMap((one) => objects(spec, one, name));
}

function Fields({ spec, schema, depth = 0 }) {
  const required = new Set(schema.required ?? []);
  const entries = Object.entries(schema.properties ?? {}).sort(([a], [b]) => required.has(b) - required.has(a));
  return html`<table class="fields">
    <thead class="sr"><tr><th scope="col">Name</th><th scope="col">Type</th></tr></thead>
    <tbody>${entries.map(([name, field]) => {
      const inner = depth < 3 ? objects(spec, field, name) : [];
      return html`<tr>
        <th scope="row"><code>${name}</code>${required.has(name) && html`<em>required</em>`}</th>
        <td><span class="type">${typeOf(field)}${rangeOf(field)}${defaultOf(field)}</span>${field.description && html`<p>${field.description}</p>`}
          ${inner.map(([title, one]) => html`<details><summary>${title}</summary><${Fields} spec=${spec} schema=${one} depth=${depth + 1} /></details>`)}</td>
      </tr>`;
    })}</tbody>
  </table>`;
}

// The fields of a form that curl must send.
function formFlags(schema) {
  const value = (field) => (field.format === "binary" ? "@FILE" : field.enum?.[0] ?? "VALUE");
  return (schema?.required ?? []).map((name) => ` -F ${name}=${value(schema.properties[name])}`).join("");
}

function example(operation, model) {
  if (operation.responses["101"]) return `websocat ${location.origin.replace(/^http/, "ws")}${operation.path}`; // curl opens no WebSocket
  const body = operation.requestBody?.content["application/json"]?.example;
  const form = formFlags(operation.requestBody?.content["multipart/form-data"]?.schema);
  const key = readKey() && operation.security?.length !== 0 ? ` \\\n  -H "Authorization: Bearer $PENSTOCK_API_KEY"` : "";
  const method = operation.method === "get" || body || form ? "" : ` -X ${operation.method.toUpperCase()}`;
  const data = body ? ` \\\n  -H "Content-Type: application/json" \\\n  -d '${JSON.stringify(body).replaceAll("'", `'\\''`)}'` : form && ` \\\n ${form}`;
  const path = operation.path.replace("{model}", () => encodeURI(model) || "{model}").replace("{version}", "1");
  return `curl${method} ${location.origin}${path}${key}${data}`;
}

// What a search looks through: the route, and its parameters.
function textOf(spec, { method, path, summary, requestBody }) {
  const [content] = Object.values(requestBody?.content ?? {});
  const [schema] = resolve(spec, content?.schema);
  return `${method} ${path} ${summary} ${Object.keys(schema.properties ?? {}).join(" ")}`.toLowerCase();
}

// A path that may continue in the next line from a slash on.
const breakable = (path) => path.replaceAll(/(?<=.)\//g, "\u200b/");
const anchor = (operation) => `${operation.method}${operation.path.replaceAll(/[^\w]+/g, "-")}`;

function Operation({ spec, operation, model }) {
  const [content] = Object.values(operation.requestBody?.content ?? {});
  const [schema] = resolve(spec, content?.schema);
  const text = example(operation, model);
  const answer = operation.responses["200"]?.content?.["application/json"]?.schema;
  const streams = Object.keys(operation.responses["200"]?.content ?? {}).filter((kind) => kind !== "application/json" && operation.requestBody);
  return html`<section class="operation" id=${anchor(operation)} aria-labelledby="${anchor(operation)}-title">
    <h3 id="${anchor(operation)}-title"><span class="method ${operation.method}">${operation.method.toUpperCase()}</span><code>${operation.path}</code></h3>
    <p class="summary">${operation.summary}${operation.security?.length === 0 && html`<span class="tag">no key needed</span>`}${streams.map((kind) => html`<span class="tag">streams ${kind}</span>`)}</p>
    <div class="snippet"><${Code} text=${text} lang="bash" /><${CopyButton} text=${text} label="Copy the command" /></div>
    ${schema.properties && html`<details class="body"><summary>Body: ${Object.keys(schema.properties).length} parameters</summary><${Fields} spec=${spec} schema=${schema} /></details>`}
    ${objects(spec, answer, "").map(([, one], i) => html`<details class="body"><summary>${i ? "Or" : "Answer"}: ${Object.keys(one.properties).length} fields</summary><${Fields} spec=${spec} schema=${one} /></details>`)}
  </section>`;
}

function App() {
  const [spec, setSpec] = useState(null);
  const [model, setModel] = useState("");
  const [problem, setProblem] = useState("");
  const [keyNeeded, setKeyNeeded] = useState(false);
  const [search, setSearch] = useState("");
  const connect = async () => {
    setKeyNeeded(false);
    try {
      setSpec(await fetchJSON("/openapi.json"));
      setModel((await fetchJSON("/server_info")).model);
      setProblem("");
    } catch (error) {
      setProblem(error.message);
      setKeyNeeded(error.status === 401);
    }
  };
  useEffect(() => void connect(), []);
  useEffect(() => {
    if (spec && location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
  }, [spec]);
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const all = spec ? operations(spec).filter((one) => words.every((word) => textOf(spec, one).includes(word))) : [];
  const tags = [...new Set(all.map((operation) => operation.tags[0]))];
  const titleOf = (tag) => TITLES[tag] ?? tag;
  return html`<${Header} model=${model} />
    <div class="layout">
      <nav class="contents" aria-label="Routes">
        <label class="sr" for="search">Search</label>
        <input id="search" type="text" placeholder="Search" value=${search} onInput=${(event) => setSearch(event.target.value)} />
        ${tags.map((tag) => html`<h2>${titleOf(tag)}</h2><ul>${all.filter((one) => one.tags[0] === tag).map((one) => html`<li><a href="#${anchor(one)}"><span class="method ${one.method}">${one.method.toUpperCase()}</span><span class="path">${breakable(one.path)}</span></a></li>`)}</ul>`)}
      </nav>
      <main>
        <h1>API</h1>
        <p class="lead">The routes of this server${spec && html`, Penstock ${spec.info.version}`}. Base URL: <code>${location.origin}</code>. The same as a document for tools: <a href="/openapi.json">openapi.json</a>.</p>
        ${problem && !keyNeeded && html`<div class="problem" role="alert">${problem}</div>`}
        ${tags.map((tag) => html`<h2 class="wire">${titleOf(tag)}</h2>${all.filter((one) => one.tags[0] === tag).map((one) => html`<${Operation} key=${anchor(one)} spec=${spec} operation=${one} model=${model} />`)}`)}
        ${spec && !all.length && html`<p>No route has “${search}”.</p>`}
      </main>
    </div>
    ${keyNeeded && html`<${KeyDialog} onDone=${connect} />`}`;
}

render(html`<${App} />`, document.getElementById("app"));
