"""The dialect of the OpenAI API: completions, chat and models, with vLLM's tokenize and detokenize."""

from penstock.frontend.openai.chat import read_chat
from penstock.frontend.openai.completions import read_completion
from penstock.frontend.openai.errors import encode_error
from penstock.frontend.openai.models import encode_model, encode_models
from penstock.frontend.openai.tokens import detokenize, tokenize

GENERATE_ROUTES = {"/v1/completions": read_completion, "/v1/chat/completions": read_chat}
TOKEN_ROUTES = {"/tokenize": tokenize, "/detokenize": detokenize}

__all__ = ["GENERATE_ROUTES", "TOKEN_ROUTES", "encode_error", "encode_model", "encode_models"]
