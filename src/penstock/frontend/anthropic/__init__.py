"""The wire of Anthropic's API: messages, their tokens counted, and models."""

from penstock.frontend.anthropic import answers
from penstock.frontend.anthropic.errors import encode_error
from penstock.frontend.anthropic.fields import MessageFields, PromptFields
from penstock.frontend.anthropic.messages import count_tokens, read_message
from penstock.frontend.anthropic.models import list_models, show_model
from penstock.frontend.describe import Operation

_MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
OPERATIONS = {
    "read_message": Operation(
        summary="Answer a conversation",
        shape=answers.MESSAGE,
        request=MessageFields,
        example={"messages": _MESSAGES, "max_tokens": 64},
        stream="text/event-stream",
    ),
    "count_tokens": Operation(
        summary="Count the tokens of a conversation",
        shape=answers.COUNT,
        request=PromptFields,
        example={"messages": _MESSAGES},
    ),
    "list_models": Operation(summary="List the model's names", shape=answers.MODELS),
    "show_model": Operation(summary="Show the model under one of its names", shape=answers.MODEL),
}
