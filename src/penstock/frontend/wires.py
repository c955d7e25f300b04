"""The wires: the APIs that the server speaks. The package of a wire is imported when a request needs it."""

from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, NamedTuple

from penstock.frontend.errors import APIError
from penstock.frontend.http.asgi import Answer, Scope, header

# The signature of a route's function:
#   generate: async (body: bytes, context: RequestContext) -> Call, or an answer if there is nothing to generate
#   answer:   async (body: bytes, context: RequestContext) -> bytes | Answer | StreamedAnswer; no body is read for GET
#   upload:   async (chunks: AsyncIterator[bytes], context: RequestContext) -> bytes; the body may be large
#   socket:   () -> SocketCodec, for each WebSocket; the method is GET, and the path has no parameters
Kind = Literal["generate", "answer", "upload", "socket"]


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
    binary: bool = False  # a header may say that binary data follows the JSON of a body


class Wire:
    """One API. Its package has the functions of its routes, and `encode_error(error: APIError) -> Answer`."""

    def __init__(
        self, name: str, load: Callable[[], ModuleType], routes: tuple[WireRoute, ...], *, any_type: bool = False
    ) -> None:
        """`any_type`: bodies may have any content type, or none, as clients of this API send none."""
        self.name = name
        self.any_type = any_type
        self.routes = routes
        self._load = load

    @cached_property
    def package(self) -> Any:
        return self._load()

    def encode_error(self, error: APIError) -> Answer:
        encoded: Answer = self.package.encode_error(error)
        return encoded


def _names_version(scope: Scope) -> bool:
    """True for Anthropic's clients, which name a version of its API."""
    return header(scope, b"anthropic-version") is not None


def _takes_html(scope: Scope) -> bool:
    """True for browsers, which accept HTML. Ollama's clients do not."""
    return b"text/html" in (header(scope, b"accept") or b"")


OPENAI = Wire(
    "openai",
    lambda: import_module("penstock.frontend.openai"),
    (
        WireRoute("POST", "/v1/completions", "generate", "read_completion"),
        WireRoute("POST", "/v1/chat/completions", "generate", "read_chat"),
        WireRoute("GET", "/v1/chat/ws", "socket", "ChatSocket"),
        WireRoute("GET", "/v1/models", "answer", "list_models"),
        WireRoute("GET", "/v1/models/{id:path}", "answer", "show_model"),
        WireRoute("POST", "/v1/embeddings", "answer", "embeddings"),
        WireRoute("POST", "/tokenize", "answer", "tokenize"),
        WireRoute("POST", "/detokenize", "answer", "detokenize"),
        WireRoute("GET", "/tokenizer_info", "answer", "tokenizer_info"),
    ),
)
# Parts of OpenAI's API that few clients use have packages of their own.
RESPONSES = Wire(
    "openai",
    lambda: import_module("penstock.frontend.responses"),
    (
        WireRoute("POST", "/v1/responses", "generate", "create_response"),
        WireRoute("GET", "/v1/responses", "socket", "ResponseSocket"),
        WireRoute("POST", "/v1/responses/input_tokens", "answer", "count_input_tokens"),
        WireRoute("GET", "/v1/responses/{id}", "answer", "show_response"),
        WireRoute("DELETE", "/v1/responses/{id}", "answer", "delete_response"),
        WireRoute("POST", "/v1/responses/{id}/cancel", "answer", "cancel_response"),
        WireRoute("GET", "/v1/responses/{id}/input_items", "answer", "list_input_items"),
    ),
)
BATCHES = Wire(
    "openai",
    lambda: import_module("penstock.frontend.batches"),
    (
        WireRoute("POST", "/v1/files", "upload", "create_file"),
        WireRoute("GET", "/v1/files", "answer", "list_files"),
        WireRoute("GET", "/v1/files/{id}", "answer", "show_file"),
        WireRoute("DELETE", "/v1/files/{id}", "answer", "delete_file"),
        WireRoute("GET", "/v1/files/{id}/content", "answer", "show_content"),
        WireRoute("POST", "/v1/batches", "answer", "create_batch"),
        WireRoute("GET", "/v1/batches", "answer", "list_batches"),
        WireRoute("GET", "/v1/batches/{id}", "answer", "show_batch"),
        WireRoute("POST", "/v1/batches/{id}/cancel", "answer", "cancel_batch"),
    ),
)
ANTHROPIC = Wire(
    "anthropic",
    lambda: import_module("penstock.frontend.anthropic"),
    (
        WireRoute("POST", "/v1/messages", "generate", "read_message"),
        WireRoute("POST", "/v1/messages/count_tokens", "answer", "count_tokens"),
        WireRoute("GET", "/v1/models", "answer", "list_models", _names_version),
        WireRoute("GET", "/v1/models/{id:path}", "answer", "show_model", _names_version),
    ),
)
OLLAMA = Wire(
    "ollama",
    lambda: import_module("penstock.frontend.ollama"),
    (
        WireRoute("GET", "/", "answer", "greet"),
        WireRoute("POST", "/api/chat", "generate", "read_chat"),
        WireRoute("POST", "/api/generate", "generate", "read_generate"),
        WireRoute("POST", "/api/embed", "answer", "embed"),
        WireRoute("POST", "/api/embeddings", "answer", "embeddings"),
        WireRoute("GET", "/api/tags", "answer", "list_models"),
        WireRoute("GET", "/api/ps", "answer", "list_running"),
        WireRoute("GET", "/api/version", "answer", "show_version"),
        WireRoute("POST", "/api/show", "answer", "show_model"),
        WireRoute("POST", "/api/pull", "answer", "pull"),
        WireRoute("DELETE", "/api/delete", "answer", "delete"),
        WireRoute("POST", "/api/create", "answer", "create"),
        WireRoute("POST", "/api/copy", "answer", "copy"),
        WireRoute("POST", "/api/push", "answer", "push"),
    ),
    any_type=True,
)
TGI = Wire(
    "tgi",
    lambda: import_module("penstock.frontend.tgi"),
    (
        WireRoute("POST", "/", "generate", "read_any"),
        WireRoute("POST", "/generate", "generate", "read_generate"),
        WireRoute("POST", "/generate_stream", "generate", "read_stream"),
        WireRoute("GET", "/info", "answer", "show_info"),
    ),
)
_MODEL = "/v2/models/{model:path}"  # a name may have a slash
KSERVE = Wire(
    "kserve",
    lambda: import_module("penstock.frontend.kserve"),
    (
        WireRoute("GET", "/v2", "answer", "show_server"),
        WireRoute("GET", "/v2/models/stats", "answer", "show_all_stats"),
        WireRoute("POST", "/v2/repository/index", "answer", "list_repository"),
        WireRoute("POST", "/v2/repository/models/{model:path}/load", "answer", "load"),
        WireRoute("POST", "/v2/repository/models/{model:path}/unload", "answer", "unload"),
        WireRoute("POST", "/v2/repository/models/{model:path}/rollout", "answer", "change_rollout"),
        WireRoute("GET", "/v2/repository/rollouts", "answer", "list_rollouts"),
        WireRoute("POST", "/feedback", "answer", "give_feedback"),
        *(
            WireRoute(method, f"/v2/{kind}sharedmemory{region}/{verb}", "answer", name)
            for kind, method, verb, name in (
                ("system", "GET", "status", "show_memory"),
                ("system", "POST", "unregister", "unregister_memory"),
                ("cuda", "GET", "status", "show_cuda_memory"),
                ("cuda", "POST", "unregister", "show_cuda_memory"),
            )
            for region in ("", "/region/{region}")
        ),
        WireRoute("POST", "/v2/systemsharedmemory/region/{region}/register", "answer", "register_memory"),
        WireRoute("POST", "/v2/cudasharedmemory/region/{region}/register", "answer", "register_cuda_memory"),
        *(
            route
            for start in (_MODEL + "/versions/{version}", _MODEL)
            for route in (
                WireRoute("GET", start + "/ready", "answer", "is_ready"),
                WireRoute("GET", start + "/stats", "answer", "show_stats"),
                WireRoute("GET", start + "/config", "answer", "show_config"),
                WireRoute("POST", start + "/infer", "generate", "read_infer", binary=True),
                WireRoute("POST", start + "/infer_stream", "generate", "read_infer_stream"),
                WireRoute("POST", start + "/generate", "generate", "read_generate"),
                WireRoute("POST", start + "/generate_stream", "generate", "read_stream"),
                WireRoute("GET", start, "answer", "show_model"),  # last: its path has those of the others
            )
        ),
    ),
    any_type=True,
)
RERANK = Wire(
    "rerank",
    lambda: import_module("penstock.frontend.rerank"),
    (
        WireRoute("POST", "/rerank", "answer", "rerank"),
        WireRoute("POST", "/v1/rerank", "answer", "rerank"),
        WireRoute("POST", "/v2/rerank", "answer", "rerank_v2"),
        WireRoute("POST", "/score", "answer", "score"),
        WireRoute("POST", "/v1/score", "answer", "score"),
        WireRoute("POST", "/classify", "answer", "classify"),
    ),
)
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
        WireRoute("GET", "/tenant_usage", "answer", "show_usage", logged=False),
    ),
)
WIRES = (OPENAI, RESPONSES, BATCHES, ANTHROPIC, OLLAMA, TGI, KSERVE, RERANK, PAGES)
