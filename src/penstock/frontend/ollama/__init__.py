"""The wire of Ollama's API."""

from penstock.frontend.ollama.chat import read_chat
from penstock.frontend.ollama.errors import encode_error
from penstock.frontend.ollama.generate import read_generate
from penstock.frontend.ollama.models import delete, greet, list_models, list_running, pull, show_model, show_version

__all__ = [
    "delete",
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
