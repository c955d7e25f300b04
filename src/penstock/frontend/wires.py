"""The wires: the APIs that the server speaks. The package of a wire is imported when a request needs it."""

from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, NamedTuple

from penstock.frontend.http.asgi import Scope, header

# What a route's function does:
#   generate: async (body: bytes, context: RequestContext) -> Call
#   answer:   async (body: bytes, context: RequestContext) -> bytes | Answer; no body is read for GET and DELETE
#   raw:      async (scope, receive, send, context: RequestContext) -> None
Kind = Literal["generate", "answer", "raw"]


class WireRoute(NamedTuple):
    """One route: a method, a path in Starlette's form, and the name of the function in the wire's package.

    Several routes may have the same method and path. A request goes to the first one whose `when` is true, else to the
    first one without `when`.
    """

    method: str
    path: str
    kind: Kind
    function: str
    when: Callable[[Scope], bool] | None = None
    public: bool = False  # a file of a page: answered without an API key, and to a reader who comes from another site
    logged: bool = True  # False: successful requests are not in the log


class Wire:
    """One API. Its package has the functions of its routes, and `encode_error(error: APIError) -> Answer`."""

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


def _takes_html(scope: Scope) -> bool:
    """Whether a browser asks. Ollama's clients get another answer."""
    return b"text/html" in (header(scope, b"accept") or b"")


PAGES = Wire(
    "pages",
    lambda: import_module("penstock.frontend.pages"),
    (
        WireRoute("GET", "/", "answer", "show_playground", _takes_html, public=True),
        WireRoute("GET", "/dashboard", "answer", "show_dashboard", public=True),
        WireRoute("GET", "/docs", "answer", "show_docs", public=True),
        WireRoute("GET", "/pages/{version}/{folder}/{file}", "answer", "show_file", public=True, logged=False),
        WireRoute("GET", "/server_info", "answer", "show_server"),
        WireRoute("GET", "/server_load", "answer", "show_load", logged=False),
    ),
)
WIRES = (OPENAI, PAGES)
