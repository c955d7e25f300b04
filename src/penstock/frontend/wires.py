"""The wires: the APIs that the server speaks. The package of a wire is imported when a request needs it."""

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any, Literal, NamedTuple

# What a route's function does:
#   generate: async (body: bytes, context: RequestContext) -> Call
#   answer:   async (body: bytes, context: RequestContext) -> bytes | Answer; no body is read for GET and DELETE
#   raw:      async (scope, receive, send, context: RequestContext) -> None
Kind = Literal["generate", "answer", "raw"]


class WireRoute(NamedTuple):
    """One route: a method, a path in Starlette's form, and the name of the function in the wire's package."""

    method: str
    path: str
    kind: Kind
    function: str
    public: bool = False  # a file of a page: answered without an API key, and to a reader who comes from another site
    logged: bool = True  # False: successful requests are not in the log


class Answer(NamedTuple):
    """An answer that is not JSON with status 200."""

    body: bytes
    status: int = 200
    content_type: bytes = b"application/json"
    headers: Mapping[str, str] = MappingProxyType({})


class Wire:
    """One API. Its package has the functions of its routes, and `encode_error(error: APIError) -> bytes`."""

    def __init__(self, name: str, load: Callable[[], ModuleType], routes: tuple[WireRoute, ...]) -> None:
        self.name = name
        self.routes = routes
        self._load = load

    @cached_property
    def package(self) -> Any:
        return self._load()


OPENAI = Wire(
    "openai",
    lambda: import_module("penstock.frontend.openai"),
    (
        WireRoute("POST", "/v1/completions", "generate", "read_completion"),
        WireRoute("POST", "/v1/chat/completions", "generate", "read_chat"),
        WireRoute("GET", "/v1/models", "answer", "list_models"),
        WireRoute("GET", "/v1/models/{id:path}", "answer", "show_model"),
        WireRoute("POST", "/tokenize", "answer", "tokenize"),
        WireRoute("POST", "/detokenize", "answer", "detokenize"),
    ),
)
PAGES = Wire(
    "pages",
    lambda: import_module("penstock.frontend.pages"),
    (
        WireRoute("GET", "/", "answer", "show_playground", public=True),
        WireRoute("GET", "/dashboard", "answer", "show_dashboard", public=True),
        WireRoute("GET", "/docs", "answer", "show_docs", public=True),
        WireRoute("GET", "/pages/{version}/{folder}/{file}", "answer", "show_file", public=True, logged=False),
        WireRoute("GET", "/openapi.json", "answer", "show_openapi"),
        WireRoute("GET", "/server_info", "answer", "show_server"),
        WireRoute("GET", "/server_load", "answer", "show_load", logged=False),
    ),
)
WIRES = (OPENAI, PAGES)
