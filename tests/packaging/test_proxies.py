"""The recipes for proxies in docs/operations.md, read by the proxies, and what they must say."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.config.server import ServerConfig
from penstock.frontend.http.access import ADMIN_PATHS
from tests.e2e.certificates import Authority

PAGE = (Path(__file__).parents[2] / "docs/operations.md").read_text()
PROXIES = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"apt install {name}"))
    for name in ("nginx", "haproxy")
]


def recipe(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def configured(
    name: str, folder: Path, authority: Authority, port: int, ports: Sequence[int], grpc_ports: Sequence[int]
) -> list[str]:
    """Writes a proxy's recipe into a folder, with these ports, and a certificate. Returns the command of the proxy."""
    chain, key = authority.sign(1)
    (folder / "llm.pem").write_bytes(chain + key)
    (folder / "llm.key").write_bytes(key)
    text = recipe(name).replace(f"/etc/{name}/", f"{folder}/")
    text = text.replace("listen 443", f"listen 127.0.0.1:{port}").replace("bind :443", f"bind 127.0.0.1:{port}")
    for given, used in zip((8000, 8001, 9000, 9001), (*ports, *grpc_ports), strict=True):
        text = re.sub(rf"\b{given}\b", str(used), text)
    if name == "nginx":
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
        head = f"user root; daemon off; pid {folder}/pid; error_log stderr; events {{}}"
        text = f"{head}\nhttp {{ access_log off; {paths}\n{text} }}"
    file = folder / f"{name}.conf"
    file.write_text(text)
    return [name, "-p", str(folder), "-c", str(file)] if name == "nginx" else [name, "-db", "-f", str(file)]


@pytest.mark.parametrize("name", PROXIES)
def test_the_proxy_accepts_its_recipe(name: str, tmp_path: Path) -> None:
    command = configured(name, tmp_path, Authority(tmp_path), 18443, (8000, 8001), (9000, 9001))
    checked = [*command, "-t", "-q"] if name == "nginx" else [*command, "-c"]
    done = subprocess.run(checked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr


@pytest.mark.parametrize("language", ["nginx", "haproxy"])
def test_they_hide_the_operators_routes_and_forward_the_rest(language: str) -> None:
    text = recipe(language)
    hidden = next(line for line in text.splitlines() if "404" in line)
    assert all(path.decode().removeprefix("/") in hidden for path in (*ADMIN_PATHS, b"/metrics"))
    assert "503" in text and "/inference.GRPCInferenceService/" in text
    assert "X-Forwarded-For" in text or "option forwardfor" in text
    assert "$http_upgrade" in text or "timeout tunnel" in text  # WebSockets


def test_nginx_takes_bodies_as_large_as_the_server() -> None:
    (size,) = re.findall(r"client_max_body_size (\d+)m;", recipe("nginx"))
    assert int(size) << 20 == ServerConfig().max_body_bytes
