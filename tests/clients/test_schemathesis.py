"""schemathesis sends what the OpenAPI document allows and what it does not, NUL bytes among it, to every route: no 5xx,
no hang, and only the statuses, content types and bodies that the document describes.

python -m tests.clients install FOLDER schemathesis
TEST_CLIENTS=FOLDER pytest -m rare tests/clients/test_schemathesis.py
"""

import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.clients.matrix import PROGRAMS, SCHEMATHESIS
from tests.e2e.server import Server, serving
from tests.smollm2 import smollm2

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("response_headers_conformance", "unsupported_method", "allow_header_conformance"),
)
SECONDS = int(os.environ.get("SCHEMATHESIS_SECONDS", "120"))  # for all routes of a server
ENGINE = ("--include-path", "/sleep", "--include-path", "/reload")  # each request of these starts an engine
OTHERS = ("--exclude-path", "/sleep", "--exclude-path", "/reload")


def known(server: Server, model: str) -> str:
    """What the paths of requests can name: the model, and a file, a batch and a response of the server."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        line = {"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}
        form = {"files": {"file": ("in.jsonl", json.dumps(line).encode())}, "data": {"purpose": "batch"}}
        file = http.post("/v1/files", **form).raise_for_status().json()["id"]
        wanted = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = http.post("/v1/batches", json=wanted).raise_for_status().json()["id"]
        found = {"model": model, "version": "1", "/v1/models/id": model, "/v1/files/id": file, "/v1/batches/id": batch}
        answer = http.post("/v1/responses", json={"input": "hello", "max_output_tokens": 2})
        if answer.is_success:  # an encoder answers no chats
            found["/v1/responses/id"] = answer.json()["id"]
    return json.dumps(found)


def run(server: Server, names: str, tmp_path: Path, *flags: str) -> None:
    program = SCHEMATHESIS.runtime().with_name("schemathesis")
    command = [str(program), "--no-color", "run", f"{server.url}/openapi.json", "--checks", ",".join(CHECKS)]
    command += ["--mode", "all", "--generation-allow-x00", "true", "--request-timeout", "60", "--continue-on-failure"]
    environment = {
        **os.environ,
        "KNOWN": names,
        "PYTHONPATH": str(PROGRAMS),
        "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
    }
    done = subprocess.run(
        [*command, "--generation-database", "none", "--seed", "1", *flags],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS * 3 + 300,
    )
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-3000:]
    assert server.get("/readyz").status_code == 200


@pytest.mark.rare
@pytest.mark.parametrize("model", ["smollm2", "minilm"])
def test_every_route_does_what_the_document_says(tmp_path: Path, model: str) -> None:
    if not SCHEMATHESIS.is_installed():
        pytest.skip(
            f"TEST_CLIENTS has no {SCHEMATHESIS.name}; python -m tests.clients install FOLDER schemathesis makes it"
        )
    path = str(smollm2()) if model == "smollm2" else "all-minilm-l6-v2"
    flags = ("--max-num-seqs", "8", "--max-model-len", "128", "--state-dir", str(tmp_path / "state"))
    with serving(tmp_path / "log", *flags, "--served-model-name", model, model=path) as server:
        names = known(server, model)
        run(server, names, tmp_path, *OTHERS, "--max-examples", "50", "--max-time", str(SECONDS))
        run(server, names, tmp_path, *ENGINE, "--max-examples", "2", "--phases", "examples,fuzzing", "--max-time", "30")
