"""The wire of Ollama's API."""

from collections.abc import Mapping

from penstock.frontend.describe import Operation
from penstock.frontend.ollama.chat import read_chat
from penstock.frontend.ollama.embed import EmbeddingsFields, EmbedFields, embed, embeddings
from penstock.frontend.ollama.errors import encode_error
from penstock.frontend.ollama.fields import ChatFields, GenerateFields, ModelFields
from penstock.frontend.ollama.generate import read_generate
from penstock.frontend.ollama.models import delete, greet, list_models, list_running, pull, show_model, show_version

__all__ = [
    "OPERATIONS",
    "delete",
    "embed",
    "embeddings",
    "encode_error",
    "greet",
    "list_models",
    "list_running",
    "pull",
    "read_chat",
    "read_generate",
    "show_model",
    "show_version",
]

OPERATIONS: Mapping[str, Operation] = {
    "read_chat": Operation(summary="Answer a conversation", request=ChatFields, stream="application/x-ndjson"),
    "read_generate": Operation(summary="Answer a prompt", request=GenerateFields, stream="application/x-ndjson"),
    "embed": Operation(summary="Embed texts", request=EmbedFields),
    "embeddings": Operation(summary="Embed a text", request=EmbeddingsFields),
    "show_model": Operation(summary="Describe the model", request=ModelFields),
    "pull": Operation(summary="Check that the model is served", request=ModelFields, stream="application/x-ndjson"),
    "delete": Operation(summary="Refuse to delete the model", request=ModelFields),
    "greet": Operation(summary="Say that the server runs", answer="text/plain"),
}
