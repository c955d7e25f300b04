"""The wire of the OpenAI API: completions, chat and models, with vLLM's tokenize and detokenize."""

from penstock.frontend.openai.chat import read_chat
from penstock.frontend.openai.completions import read_completion
from penstock.frontend.openai.embeddings import embeddings
from penstock.frontend.openai.errors import encode_error
from penstock.frontend.openai.models import list_models, show_model
from penstock.frontend.openai.tokens import detokenize, tokenize

__all__ = [
    "detokenize",
    "embeddings",
    "encode_error",
    "list_models",
    "read_chat",
    "read_completion",
    "show_model",
    "tokenize",
]
