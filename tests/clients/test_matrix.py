"""The clients of docs/tested-clients.md, in the environments that `python -m tests.clients install FOLDER` makes.

TEST_CLIENTS=FOLDER pytest -m "" tests/clients/test_matrix.py
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.matrix import CLIENTS, ENVIRONMENTS, PROGRAMS, Client
from tests.clients.table import PAGE, read
from tests.docs.pages import ROOT, Block, blocks
from tests.e2e.server import Server
from tests.encoders import minilm

TEXTS = [
    "A penstock is a pipe.",
    "The pipe that feeds a turbine under full head. " * 9,
    "My dog is brown.",
    "x",
    "Ünïcode 你好",
]
# The recipes of docs/clients.md, in the environment of the newest version of the package that they import.
IMPORTED = re.compile(
    r"""^import (cohere|instructor|litellm|ollama|tritonclient)|^from (llama_index)|^from (\w+) import|from "(ai)";$""",
    re.MULTILINE,
)
RECIPES = [block for block in blocks(ROOT / "docs" / "clients.md") if block.language in ("python", "js")]


def test_the_page_has_a_passed_run_of_every_client() -> None:
    results = read(PAGE)
    lacking = (client for client in CLIENTS if client not in results)
    failed = (client for client, result in results.items() if not (result.passed and result.behind))
    assert [client.name for client in (*lacking, *failed)] == []


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with texts and their embeddings by transformers: the mean of the last states, of length 1."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(minilm()), AutoTokenizer.from_pretrained(minilm())
    rows = []
    for text in TEXTS:
        with torch.inference_mode():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        rows.append((mean / mean.norm()).tolist())
    file: Path = tmp_path_factory.mktemp("expected") / "embeddings.json"
    file.write_text(json.dumps({"texts": TEXTS, "embeddings": rows}))
    return file


def param(client: Client, *more: Block, id: str) -> Any:
    """The parameters of a test, which is skipped, before servers start for it, if there is no environment."""
    reason = f"TEST_CLIENTS has no {client.name}; python -m tests.clients install FOLDER makes it"
    return pytest.param(client, *more, id=id, marks=pytest.mark.skipif(not client.is_installed(), reason=reason))


def client_of(recipe: Block) -> Client:
    """The client of a recipe, in its newest version."""
    found = IMPORTED.search(recipe.text)
    assert found, f"{recipe.where} imports no client of matrix.py"
    name = next(filter(None, found.groups()))
    return next(client for client in CLIENTS if client.package.replace("-", "_").removesuffix("_core") == name)


@pytest.mark.long
@pytest.mark.parametrize("through", ["server", "gateway"])
@pytest.mark.parametrize(
    "client", [param(client, id=client.name) for client in CLIENTS if client.tests == "test_matrix.py"]
)
def test_a_client_works_unmodified(
    client: Client, through: str, request: pytest.FixtureRequest, embedder: Server, expected: Path
) -> None:
    """Also through a gateway, which has the server as its provider."""
    if through == "gateway" and not client.generates:
        pytest.skip(f"{client.package} generates no text, and providers do nothing else")
    server: Server = request.getfixturevalue(through)
    arguments = [server.url, "smollm2", embedder.url, "all-minilm-l6-v2", str(expected), through]
    finish(client, PROGRAMS / client.script, *arguments)


@pytest.mark.long
@pytest.mark.parametrize(
    ("client", "recipe"), [param(client_of(recipe), recipe, id=f"line {recipe.line}") for recipe in RECIPES]
)
def test_a_recipe_of_the_docs_runs(client: Client, recipe: Block, server: Server, embedder: Server) -> None:
    both = ":8001" in recipe.text  # a server that chats, and one that embeds
    url = (embedder if "all-minilm" in recipe.text and not both else server).url
    code = recipe.text.replace("smollm2-135m", "smollm2").replace("http://127.0.0.1:8000", url)
    code = code.replace("http://127.0.0.1:8001", embedder.url)
    script = ENVIRONMENTS / client.name / f"recipe.{'mjs' if client.node else 'py'}"
    script.write_text(code.replace("127.0.0.1:8000", url.removeprefix("http://")))
    assert finish(client, script).strip()


def finish(client: Client, script: Path, *arguments: str) -> str:
    """Runs a script in the environment of a client. Returns what it prints."""
    done = subprocess.run(
        [str(client.runtime()), str(script), *arguments],
        cwd=ENVIRONMENTS / client.name,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout
