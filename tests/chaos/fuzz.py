"""Requests to every route of every wire, made from the server's own description of them and then spoilt."""

import asyncio
import json
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from penstock.frontend.wires import WIRES
from tests.chaos.place import Place, place, require

AT_ONCE = 8
CUT_SECONDS = 3.0  # after which a client leaves
SLOW_SECONDS = 30.0  # an answer that takes longer is shown
# Shares of all requests
ENCODER = 0.15  # to a server of a model that gives vectors
RAW, GARBLED, WRONG_HEADERS = 0.08, 0.1, 0.05

_HUGE = 10**30
_TEXTS = (
    "",
    "a",
    "\0",
    "é" * 7,
    "\U0001f4a5",
    "\u202e",
    "\ud800",
    "x" * 9000,
    "a b " * 600,
    "<|im_end|>",
    "{{7*7}}",
    "../..",
)
_NUMBERS = (0, 1, -1, 2, 7, 0.5, 1e-30, 1e308, -1e308, 2**31, 2**53, 2**63, 2**64, -(2**63), _HUGE, True)
_ODD = (None, [], {}, "", 0, -1, True, "null", [[]], [None], {"": ""}, {"a": {"a": {"a": []}}})
_GARBAGE = (b"", b"{", b"null", b"[]", b'"', b"\xff\xfe", b"{}" * 9, b"[" * 70, b'{"a":1e999}')
_SCHEMAS = (
    True,
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "array", "items": {"$ref": "#"}},
    {"$ref": "http://127.0.0.1:1/schema"},
    {"enum": [None, 1, "a", {}]},
    {"type": "integer", "minimum": _HUGE},
    {"allOf": [{"type": "string"}] * 40, "not": {}},
)
_FUNCTION = {"name": "f", "parameters": _SCHEMAS[1]}
# Fields whose type the description leaves open, and some that are never right by chance.
_KNOWN: dict[str, tuple[Any, ...]] = {
    "tools": ([{"type": "function", "function": _FUNCTION}], [{"name": "f", "input_schema": _SCHEMAS[1]}], [{}] * 130),
    "tool_choice": ("required", "auto", "none", {"type": "any"}, {"type": "function", "function": {"name": "f"}}),
    "response_format": tuple({"type": "json_schema", "json_schema": {"name": "a", "schema": one}} for one in _SCHEMAS),
    "format": ("json", *_SCHEMAS),
    "schema": _SCHEMAS,
    "guided_json": _SCHEMAS,
    "guided_regex": ("[a-z]{3}", "(((", "(a|b)*{999999}", ".*" * 90),
    "guided_grammar": ('start: "a"', "start: start", "?"),
    "grammar": ({"type": "regex", "value": "[ab]+"}, {"type": "json", "value": _SCHEMAS[1]}, {"type": "?"}),
    "logit_bias": ({"5": 1.0}, {"5": 1e9}, {"-1": 0}, {"a": 0}, {str(_HUGE): 1}),
    "stop": ("a", ["a", "b"], [""], ["x" * 999], ["a"] * 99),
    "input": ("a river", ["a", "b"], [[1, 2]], ["x" * 9000], [[]], [-1]),
    "prompt": ("hello", ["a", "b"], [1, 2, 3], [[1], [2]], [_HUGE], [-1], ["a", 1]),
    "role": ("user", "assistant", "system", "tool", "developer", "x"),
    "messages": ([{"role": "user", "content": "hi"}], [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
    "max_tokens": (0, 1, 3, 8, 40),
    "max_completion_tokens": (0, 1, 3),
    "max_new_tokens": (1, 3, 8),
    "num_predict": (0, 1, 3, -1, -2),
    "options": ({"num_predict": 3}, {"num_predict": 3, "temperature": 9e9}, {"num_ctx": -1, "num_predict": 2}),
    "parameters": ({"max_new_tokens": 3}, {"max_tokens": 3}, {"max_new_tokens": 2, "details": True}),
    "shape": ([1], [0], [-1], [2**62, 4], [1, 1, 1]),
    "n": (1, 2, 33),
    "timeout": (1, 2.5, 0, -1, 1e9),
}


@dataclass
class Found:
    """What became of the requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    slowest: float = 0.0


class Maker:
    """Makes requests. Equal seeds make equal ones."""

    def __init__(self, document: dict[str, Any], model: str, seed: int) -> None:
        self._paths = document["paths"]
        self._schemas = document["components"]["schemas"]
        self._model = model
        self._random = random.Random(seed)
        self.routes = [(route.method, route.path) for wire in WIRES for route in wire.routes]
        self.routes += [("GET", path) for path in ("/livez", "/readyz", "/metrics", "/version", "/openapi.json")]

    def request(self) -> tuple[str, str, str, dict[str, str], bytes]:
        """(route, method, path, headers, body)"""
        choose = self._random
        # Half of the requests are for routes that take a body, of which there are fewer than half.
        some = [one for one in self.routes if one[0] == "POST"] if choose.random() < 0.7 else self.routes
        method, route = choose.choice(some)
        path = re.sub(r"{(\w+)(:\w+)?}", lambda found: self._segment(found[1]), route)
        headers = {"content-type": "application/json"}
        shown = re.sub(r":\w+}", "}", route)
        operation = self._paths.get(shown, {}).get(method.lower(), {})
        body = self._body(operation.get("requestBody"))
        if choose.random() < WRONG_HEADERS:
            headers |= choose.choice(self._headers())
            method = choose.choice((method, "PUT", "HEAD", "OPTIONS", "DELETE", "PATCH"))
        if "/v1/m" in path and choose.random() < 0.5:
            headers["anthropic-version"] = "2023-06-01"
        return f"{method} {shown}", method, path, headers, body if method not in ("GET", "HEAD") else b""

    def _segment(self, name: str) -> str:
        odd = (self._model, self._model, self._model + "/x", "..", "%00", "é", "a" * 3000, "1", "", "models.js")
        return "1" if name == "version" and self._random.random() < 0.7 else quote(self._random.choice(odd), safe="/%")

    def _headers(self) -> list[dict[str, str]]:
        return [
            {"content-type": "text/plain"},
            {"content-encoding": "gzip"},
            {"x-request-timeout": self._random.choice(("1", "0", "-1", "nan", "1e999", "9" * 400))},
            {"traceparent": "00-" + "f" * 32 + "-" + "0" * 16 + "-01"},
            {"accept": "text/html;q=" + "9" * 999},
            {"x-request-id": "\xe9" * 200},
            {"inference-header-content-length": self._random.choice(("0", "-1", "99999999999999999999", "5"))},
            {"origin": "null"},
        ]

    def _body(self, described: dict[str, Any] | None) -> bytes:
        choose = self._random
        if choose.random() < RAW:
            return choose.choice(_GARBAGE) + choose.randbytes(choose.randrange(40))
        if described is None:
            value = choose.choice(_ODD)
        else:
            content = described["content"]["application/json"]
            value = dict(content.get("example", {}))
            made = self._object(self._resolve(content["schema"]), 0, share=choose.choice((0.03, 0.15, 0.5)))
            value |= made
            if choose.random() < 0.9 and "model" in value:
                value["model"] = self._model
            if value and choose.random() < 0.2:
                value[choose.choice(list(value))] = choose.choice(_ODD)
            if choose.random() < 0.03:
                value["unknown"] = 1
        text = json.dumps(value, ensure_ascii=choose.random() < 0.5).encode(errors="surrogatepass")
        if choose.random() < GARBLED and text:
            at = choose.randrange(len(text))
            text = choose.choice((text[:at], text[:at] + choose.randbytes(2) + text[at:], text + b",", text[at:]))
        return text

    def _resolve(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def _object(self, schema: dict[str, Any], depth: int, share: float) -> dict[str, Any]:
        """Some of an object's fields, and all that must be there."""
        required = schema.get("required", ())
        properties = schema.get("properties", {})
        return {
            name: self._value(name, of, depth + 1)
            for name, of in properties.items()
            if (name in required and depth) or self._random.random() < share
        }

    def _value(self, name: str, schema: dict[str, Any], depth: int) -> Any:
        choose = self._random
        schema = self._resolve(schema)
        if name in _KNOWN and choose.random() < 0.7:
            return choose.choice(_KNOWN[name])
        if choose.random() < 0.05 or depth > 5:
            return choose.choice(_ODD)
        if options := schema.get("anyOf") or schema.get("oneOf"):
            return self._value(name, choose.choice(options), depth + 1)
        if "enum" in schema:
            return choose.choice(schema["enum"])
        kind = schema.get("type")
        match choose.choice(kind) if isinstance(kind, list) else kind:
            case "object":
                return self._object(schema, depth, 0.4)
            case "array":
                most = choose.choice((0, 1, 2, 3))
                return [self._value(name, schema.get("items") or {}, depth + 1) for _ in range(most)]
            case "string":
                return choose.choice(_TEXTS)
            case "integer" | "number":
                return choose.choice(_NUMBERS)
            case "boolean":
                return choose.random() < 0.5
            case "null":
                return None
        return choose.choice((*_TEXTS, *_NUMBERS, *_ODD))


async def send(site: Place, made: tuple[str, str, str, dict[str, str], bytes], found: Found) -> None:
    route, method, path, headers, body = made
    began, status, text = time.monotonic(), 0, b""
    try:
        async with (
            asyncio.timeout(CUT_SECONDS),
            site.http.request(method, _url(site, path), data=body or None, headers=headers) as answer,
        ):
            status = answer.status
            text = await answer.read()
    except TimeoutError:
        status = status or 1  # the client left
    except (aiohttp.ClientError, ValueError, OSError) as error:
        text = repr(error).encode()
    seconds = time.monotonic() - began
    found.slowest = max(found.slowest, seconds)
    found.statuses[status] += 1
    found.routes[route] += 1
    events = [line for line in text.split(b"\n") if b'"error"' in line and b'"internal' in line]
    in_time = status == 504 and b"deadline_exceeded" in text  # which the request has asked for
    busy = status == 529  # as Anthropic's API says it
    starting = status == 503 and b"the engine is started again" in text  # as /readyz says in a soak
    if (status >= 500 and not (in_time or busy or starting)) or events:
        found.bad.append(f"{route} -> {status}: {text[:300]!r}\n    {headers} {body[:600]!r}")


def _url(site: Place, path: str) -> Any:
    import yarl

    return yarl.URL(site.url + path, encoded=True)


async def _fuzz_server(site: Place, count: int, seed: int, found: Found) -> dict[str, Any]:
    async with site.http.get(site.url + "/openapi.json") as answer:
        maker = Maker(await answer.json(), site.model, seed)
    before, began = await site.baseline(), time.monotonic()
    made = iter([maker.request() for _ in range(count)])

    async def client() -> None:
        for one in made:
            await send(site, one, found)

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    require(site.server.process.poll() is None, "the server has ended")
    require(await site.value("penstock_engine_restarts_total") == 0, "the engine was started again")
    log = site.server.log.read_text(errors="replace")
    require("Traceback" not in log, "a traceback in the log:\n" + log[log.find("Traceback") - 500 :][:3000])
    lags = site.lags(began)
    require(lags["lag_p99_ms"] <= 5.0, f"the event loop's lag: {lags}")
    await site.require_baseline(before)
    return lags


async def fuzz(folder: Path, count: int, seed: int = 0) -> dict[str, Any]:
    """Sends requests to a server of SmolLM2, and some to one of an encoder. No answer may be a 5xx."""
    found, figures = Found(), {}
    parts = {"smollm2-135m": int(count * (1 - ENCODER)), "all-minilm-l6-v2": int(count * ENCODER)}
    for model, part in parts.items():
        async with place(folder / model, "--kv-cache-memory", "256MiB", model=model) as site:
            figures[model] = await _fuzz_server(site, part, seed, found)
    require(not found.bad, f"{len(found.bad)} answers are wrong:\n" + "\n".join(found.bad[:20]))
    routes = len(found.routes)
    worst = max(figures.values(), key=lambda one: one["lag_p99_ms"])
    longest = max(one["lag_worst_ms"] for one in figures.values())
    shares = {str(status): found.statuses[status] for status in sorted(found.statuses)}
    return {"requests": found.statuses.total(), "routes": routes, **worst, "lag_worst_ms": longest, "statuses": shares}
