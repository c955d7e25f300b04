"""The wire of Ollama's API."""

from penstock.frontend.describe import Operation
from penstock.frontend.ollama import answers
from penstock.frontend.ollama.chat import read_chat
from penstock.frontend.ollama.embed import EmbeddingsFields, EmbedFields, embed, embeddings
from penstock.frontend.ollama.errors import encode_error
from penstock.frontend.ollama.fields import ChatFields, GenerateFields, ModelFields
from penstock.frontend.ollama.generate import read_generate
from penstock.frontend.ollama.models import greet, list_models, list_running, show_model, show_version
from penstock.frontend.ollama.store import copy, create, delete, pull, push

_NDJSON = "application/x-ndjson"
OPERATIONS = {
    "greet": Operation(summary="Say that a server is here", answer="text/plain"),
    "read_chat": Operation(
        summary="Answer a chat",
        shape=answers.CHAT,
        request=ChatFields,
        example={"messages": [{"role": "user", "content": "Why is the sky blue?"}], "options": {"num_predict": 64}},
        stream=_NDJSON,
    ),
    "read_generate": Operation(
        summary="Continue a prompt",
        shape=answers.GENERATE,
        request=GenerateFields,
        example={"prompt": "Water flows", "options": {"num_predict": 32}},
        stream=_NDJSON,
    ),
    "embed": Operation(
        summary="Embed texts", shape=answers.EMBED, request=EmbedFields, example={"input": ["Water flows"]}
    ),
    "embeddings": Operation(
        summary="Embed a text", shape=answers.EMBEDDINGS, request=EmbeddingsFields, example={"prompt": "Water flows"}
    ),
    "list_models": Operation(summary="List the model's names", shape=answers.MODELS),
    "list_running": Operation(summary="List the loaded models", shape=answers.RUNNING),
    "show_version": Operation(summary="The version of Ollama's API", shape=answers.VERSION),
    "show_model": Operation(
        summary="What is known about the model", shape=answers.MODEL, request=ModelFields, example={}
    ),
    "pull": Operation(
        summary="Download a model, with --manage-models; success at once for the served one",
        shape=answers.PULLED,
        request=ModelFields,
        stream=_NDJSON,
    ),
    "create": Operation(summary="Not supported: answers 403 and what to do instead", answer=None),
    "copy": Operation(summary="Not supported: answers 403 and what to do instead", answer=None),
    "push": Operation(summary="Not supported: answers 403 and what to do instead", answer=None),
    "delete": Operation(
        summary="Remove a model that is not served, with --manage-models", request=ModelFields, answer=None
    ),
}
