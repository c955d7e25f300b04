"""The clients that run unmodified against a server, each in an environment of its own.

`python -m tests.clients` makes the environments, runs the clients and writes docs/tested-clients.md.
test_matrix.py runs the programs as tests.
"""

import os
import subprocess
import venv
from pathlib import Path
from typing import NamedTuple

PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENTS = Path(os.environ.get("TEST_CLIENTS", "/nowhere")).absolute()


class Client(NamedTuple):
    """A version of a client, and the program or the tests that run with it."""

    package: str  # a name in PyPI, or in npm for a program of Node
    version: str
    script: str  # one of programs/, or a module of tests here
    what: str  # that runs, in a few words
    also: tuple[str, ...] = ()  # further packages of its environment
    refused: str = ""  # what a gateway refuses, because providers lack it; "": nothing
    generates: bool = True  # False: it does not run behind a gateway, and `refused` is why

    @property
    def name(self) -> str:
        return f"{self.package}-{self.version}"

    @property
    def node(self) -> bool:
        return self.script.endswith(".mjs")

    @property
    def tests(self) -> str:
        """The module of the tests that run with it."""
        return self.script if self.script.startswith("test_") else "test_matrix.py"

    def runtime(self, environments: Path = ENVIRONMENTS) -> Path:
        """The interpreter of its environment."""
        return environments / self.name / ("node_modules/node/bin/node" if self.node else "bin/python")

    def is_installed(self, environments: Path = ENVIRONMENTS) -> bool:
        return (environments / self.name / "complete").exists()

    def install(self, environments: Path) -> None:
        """Makes the environment unless it exists. Raises CalledProcessError."""
        if self.is_installed(environments):
            return
        folder = environments / self.name
        folder.mkdir(parents=True, exist_ok=True)
        if self.node:
            packages = [f"node@{NODE}", f"{self.package}@{self.version}", *self.also]
            subprocess.run(["npm", "install", "--silent", *packages], cwd=folder, check=True)
        else:
            venv.create(folder, with_pip=True)
            pip = [str(self.runtime(environments)), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, f"{self.package}=={self.version}", *self.also], check=True)
        (folder / "complete").touch()


NODE = "24.21.0"  # the newest packages need 22; a machine's own may be older
_OPENAI = (
    "async and sync: chat, completions, streams, tools, `parse`, responses, embeddings, files, batches, models, errors"
)
_ANTHROPIC = "sync and async: messages, streams, tools, `count_tokens`, models, errors"
_OLLAMA = "sync and async: generate, chat, embed, streams, tools, `format`, `list`, `show`, `ps`, errors"
_NODE = "Node: chat, completions, streams, tools, `parse`, responses, embeddings, files, batches, errors"
_HUGGING_FACE = "sync and async: `text_generation` with details and streams, chats without a model, errors"
_LANGCHAIN = (
    "with `-anthropic` and `-ollama`: `invoke`, `stream`, `bind_tools`, `with_structured_output`, responses, embeddings"
)
_LITELLM = "`openai/`, `anthropic/`, `ollama/` and `ollama_chat/`: sync and async, streams, tools, schemas, embeddings"
_INSTRUCTOR = "modes for tools and JSON, partial answers"
_TRITON = "HTTP: health, metadata, statistics, `infer`"
_TRITON_GRPC = "gRPC: health, metadata, `infer`, streams, cancellation, deadlines, keys, a stop"
_COHERE = "`rerank` of both of its clients, errors"
_AI_SDK = "Node: `generateText`, `streamText`, tools, steps, `Output.object`, `embedMany`; also Anthropic's API"
_LLAMA_INDEX = "openai-like: chats, streams, embeddings, questions about documents"
_LM_EVAL = "`local-completions`: log-likelihoods to 1e-4 of those of transformers, greedy flags"
_SENTENCES = "its own embeddings of the same models, to 1e-4: the real one and tiny BERT, XLM-R and ModernBERT"
_NO_VECTORS = "providers' models only answer"

_OTHERS_0 = ("langchain-anthropic==0.3.22", "langchain-ollama==0.3.10")
_OTHERS_1 = ("langchain-anthropic==1.7.10", "langchain-ollama==1.1.0")
_GRPC = ("tritonclient[http,grpc]", "grpcio-health-checking")
_PROVIDERS_6 = ("@ai-sdk/openai-compatible@2.0.92", "@ai-sdk/openai@3.0.141", "@ai-sdk/anthropic@3.0.140", "zod")
_PROVIDERS_7 = ("@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118", "@ai-sdk/anthropic@4.0.105", "zod")
_LLAMA_INDEX_NEEDS = ("llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0")
_LM_EVAL_NEEDS = ("lm_eval[api]", "transformers", "torch==2.13.0")  # a newer torch would bring CUDA

CLIENTS = (
    *(
        Client("openai", version, "with_openai.py", _OPENAI, refused="`logprobs`")
        for version in ("3.57.0", "2.54.0", "1.109.1")
    ),
    *(Client("openai", version, "openai_node.mjs", _NODE, ("zod",)) for version in ("7.57.0", "6.49.0")),
    Client("ai", "7.0.173", "ai_sdk.mjs", _AI_SDK, _PROVIDERS_7),
    Client("ai", "6.0.326", "ai_sdk.mjs", _AI_SDK, _PROVIDERS_6),
    *(
        Client("anthropic", version, "with_anthropic.py", _ANTHROPIC, refused="`count_tokens`")
        for version in ("2.14.0", "1.17.0", "0.125.0")
    ),
    *(Client("ollama", version, "with_ollama.py", _OLLAMA) for version in ("0.6.3", "0.3.3")),
    *(
        Client(
            "huggingface_hub",
            version,
            "with_huggingface.py",
            _HUGGING_FACE,
            also,
            "ids and log-probabilities of tokens",
        )
        for version, also in (("2.4.0", ()), ("1.33.0", ()), ("0.36.2", ("aiohttp",)))
    ),
    Client("langchain-openai", "1.7.4", "with_langchain.py", _LANGCHAIN, _OTHERS_1, "counts of tokens"),
    Client("langchain-openai", "0.3.35", "with_langchain.py", _LANGCHAIN, _OTHERS_0, "counts of tokens"),
    *(Client("litellm", version, "with_litellm.py", _LITELLM) for version in ("1.110.2", "1.80.17")),
    *(Client("instructor", version, "with_instructor.py", _INSTRUCTOR) for version in ("1.17.0", "0.6.8")),
    *(Client("tritonclient", version, "triton_http.py", _TRITON, _GRPC) for version in ("2.73.0", "2.50.0")),
    *(Client("tritonclient", version, "test_grpc.py", _TRITON_GRPC, _GRPC) for version in ("2.73.0", "2.50.0")),
    *(
        Client("cohere", version, "with_cohere.py", _COHERE, refused=_NO_VECTORS, generates=False)
        for version in ("7.3.1", "6.1.0", "5.21.1")
    ),
    Client("llama-index-core", "0.14.25", "with_llama_index.py", _LLAMA_INDEX, _LLAMA_INDEX_NEEDS),
    Client(
        "lm_eval",
        "0.4.13",
        "test_lm_eval.py",
        _LM_EVAL,
        _LM_EVAL_NEEDS,
        refused="it needs log-probabilities of prompts",
        generates=False,
    ),
    Client(
        "sentence-transformers",
        "6.2.0",
        "test_sentence_transformers.py",
        _SENTENCES,
        ("torch==2.13.0",),
        refused=_NO_VECTORS,
        generates=False,
    ),
)
# Not a client: test_schemathesis.py has it send what the OpenAPI document allows, and what it does not.
SCHEMATHESIS = Client("schemathesis", "4.32.5", "test_schemathesis.py", "requests made from the OpenAPI document")
