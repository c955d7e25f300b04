"""The wire of the OpenAI API: completions, chat and models, with vLLM's tokenize, detokenize and tokenizer_info."""

from penstock.frontend.describe import Operation
from penstock.frontend.error_body import encode_error
from penstock.frontend.http.sse import STREAM_TYPE
from penstock.frontend.openai import answers
from penstock.frontend.openai.chat import read_chat
from penstock.frontend.openai.completions import read_completion
from penstock.frontend.openai.embeddings import EmbeddingFields, embeddings
from penstock.frontend.openai.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from penstock.frontend.openai.models import list_models, show_model
from penstock.frontend.openai.socket import ChatSocket
from penstock.frontend.openai.tokens import detokenize, tokenize, tokenizer_info

_STREAM = STREAM_TYPE.decode().partition(";")[0]
OPERATIONS = {
    "read_completion": Operation(
        summary="Continue one prompt, or several",
        shape=answers.COMPLETION,
        request=CompletionFields,
        example={"prompt": "Water flows", "max_tokens": 32},
        stream=_STREAM,
    ),
    "read_chat": Operation(
        summary="Answer a chat",
        shape=answers.CHAT,
        request=ChatFields,
        example={"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64},
        stream=_STREAM,
    ),
    "embeddings": Operation(
        summary="Turn texts into vectors, with an embedding model",
        shape=answers.EMBEDDINGS,
        request=EmbeddingFields,
        example={"input": ["a river", "a stream"]},
    ),
    "list_models": Operation(summary="List the model's names", shape=answers.MODELS),
    "show_model": Operation(summary="Show the model under one of its names", shape=answers.MODEL),
    "tokenize": Operation(
        summary="Turn a prompt or a chat into token ids",
        shape=answers.TOKENS,
        request=TokenizeFields,
        example={"prompt": "Water flows"},
    ),
    "detokenize": Operation(
        summary="Turn token ids into text",
        shape={"prompt": str},
        request=DetokenizeFields,
        example={"tokens": [1, 2, 3]},
    ),
    "tokenizer_info": Operation(summary="Show the special tokens and the chat template", shape=answers.TOKENIZER),
}
