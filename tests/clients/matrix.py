"""The clients that run unmodified against a server, each in an environment of its own, and the table of them in
docs/clients.md.

python -m tests.clients.matrix FOLDER          makes the environments
TEST_CLIENTS=FOLDER pytest tests/clients/test_matrix.py
"""

import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

PROGRAMS = Path(__file__).parent / "programs"


class Client(NamedTuple):
    """A version of a client, and the program that runs with it."""

    package: str  # a name in PyPI, or in npm for a program of Node
    version: str
    script: str
    what: str  # that the program does, in a few words
    also: tuple[str, ...] = ()  # further packages of its environment

    @property
    def folder(self) -> str:
        return f"{self.package.replace('/', '-').strip('@')}-{self.version}"

    @property
    def node(self) -> bool:
        return self.script.endswith(".mjs")

    def command(self, clients: Path) -> list[str]:
        """What runs the program, without its arguments."""
        script = str(PROGRAMS / self.script)
        return ["node", script] if self.node else [str(clients / self.folder / "bin" / "python"), script]

    def install(self, clients: Path) -> None:
        """Makes the environment. Raises CalledProcessError."""
        folder = clients / self.folder
        packages = [f"{self.package}{'@' if self.node else '=='}{self.version}", *self.also]
        folder.mkdir(parents=True, exist_ok=True)
        if self.node:
            subprocess.run(["npm", "install", "--silent", *packages], cwd=folder, check=True)
        else:
            venv.create(folder, with_pip=True)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, *packages], check=True)


_OPENAI = "async and sync: chat, completions, streams, tools, `parse`, responses, files, batches, models, errors"
_ANTHROPIC = "sync and async: messages, streams, tools, `count_tokens`, models, errors"
_OLLAMA = "sync and async: generate, chat, streams, tools, `format`, `list`, `show`, `ps`, errors"
_NODE = "chat, streams, tools, responses, files, batches, errors"
_HUGGING_FACE = "sync and async: `text_generation` with details and streams, chats without a model, errors"
_LANGCHAIN = "`invoke`, `stream`, `bind_tools`, `with_structured_output`"
_INSTRUCTOR = "modes for tools and JSON, partial answers"
_AI_SDK = ("@ai-sdk/openai-compatible@2.0.91", "zod")
_OTHERS_0 = ("langchain-anthropic==0.3.22", "langchain-ollama==0.3.10")
_OTHERS_1 = ("langchain-anthropic==1.7.7", "langchain-ollama==1.1.0")

CLIENTS = (
    *(Client("openai", version, "with_openai.py", _OPENAI) for version in ("3.54.0", "2.54.0", "1.109.1")),
    *(Client("openai", version, "openai_node.mjs", f"Node: {_NODE}") for version in ("7.57.0", "6.49.0")),
    *(Client("anthropic", version, "with_anthropic.py", _ANTHROPIC) for version in ("2.12.0", "1.17.0", "0.125.0")),
    *(Client("ollama", version, "with_ollama.py", _OLLAMA) for version in ("0.6.3", "0.3.3")),
    *(
        Client("huggingface_hub", version, "with_huggingface.py", _HUGGING_FACE, also)
        for version, also in (("2.4.0", ()), ("1.33.0", ()), ("0.36.2", ("aiohttp",)))
    ),
    Client("langchain-openai", "1.7.3", "with_langchain.py", _LANGCHAIN, _OTHERS_1),
    Client("langchain-openai", "0.3.35", "with_langchain.py", _LANGCHAIN, _OTHERS_0),
    *(Client("instructor", version, "with_instructor.py", _INSTRUCTOR) for version in ("1.17.0", "0.6.8")),
    Client("litellm", "1.106.2", "with_litellm.py", "with `openai/`, `anthropic/` and `ollama_chat/`: streams, tools"),
    Client(
        "tritonclient",
        "2.73.0",
        "triton_http.py",
        "HTTP: health, metadata, statistics, `infer`",
        ("tritonclient[all]", "grpcio-health-checking"),
    ),
    Client("ai", "6.0.326", "ai_sdk.mjs", "Node: `generateText`, `streamText`, tools, steps, `Output.object`", _AI_SDK),
)


def table() -> str:
    """The rows of docs/clients.md."""
    rows = [f"| `{client.package}` | {client.version} | {client.what} |" for client in CLIENTS]
    return "\n".join(["| client | version | what runs |", "|---|---|---|", *rows])


if __name__ == "__main__":
    for client in CLIENTS:
        client.install(Path(sys.argv[1]))
