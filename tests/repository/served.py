"""A server with a repository, and what tests send to its one-shot models."""

from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.e2e.server import Server

grpc = pytest.importorskip("grpc", reason="pip install 'penstock[grpc]'")

from penstock.frontend.kserve.grpc.messages import INFERENCE, MESSAGES  # noqa: E402


class Served(NamedTuple):
    server: Server
    root: Path
    grpc_port: int

    def infer(self, model: str, *inputs: dict[str, Any], version: str = "", **body: Any) -> httpx.Response:
        path = f"/v2/models/{model}{f'/versions/{version}' if version else ''}/infer"
        return self.server.post(path, {"inputs": list(inputs), **body})

    def data(self, model: str, *inputs: dict[str, Any], version: str = "") -> list[Any]:
        answer = self.infer(model, *inputs, version=version)
        assert answer.status_code == 200, answer.text
        found: list[Any] = answer.json()["outputs"][0]["data"]
        return found

    def load(self, model: str, what: str = "load", **parameters: Any) -> httpx.Response:
        return self.server.post(f"/v2/repository/models/{model}/{what}", {"parameters": parameters})

    def stats(self, model: str) -> dict[str, Any]:
        found: dict[str, Any] = self.server.get(f"/v2/models/{model}/stats").json()["model_stats"][0]
        return found

    def index(self) -> dict[tuple[str, str], str]:
        rows = self.server.post("/v2/repository/index", {}).json()
        return {(row["name"], row.get("version", "")): row.get("state", "") for row in rows}

    def call(self, method: str, request: str, answer: str, message: Any) -> Any:
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            send = channel.unary_unary(
                f"/{INFERENCE}/{method}", MESSAGES[request].SerializeToString, MESSAGES[answer].FromString
            )
            return send(message, timeout=30)


def tensor(name: str, data: list[Any], shape: list[int], datatype: str = "FP32") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}
