"""The wire of Anthropic's API: messages, their tokens counted, and models."""

from penstock.frontend.anthropic.errors import encode_error
from penstock.frontend.anthropic.messages import count_tokens, read_message
from penstock.frontend.anthropic.models import list_models, show_model

__all__ = ["count_tokens", "encode_error", "list_models", "read_message", "show_model"]
