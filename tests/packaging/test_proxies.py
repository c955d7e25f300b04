"""The recipes for proxies in docs/operations.md, read by the proxies, and what they must say."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.config.server import ServerConfig
from penstock.frontend.http.access import ADMIN_PATHS
from tests.e2e.certificates import Authority

PAGE = (Path(__file__).parents[2] / "docs/operations.md").read_text()


def recipe(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    chain, key = Authority(tmp_path).sign(1)
    (tmp_path / "llm.pem").write_bytes(chain + key)
    (tmp_path / "llm.key").write_bytes(key)
    return tmp_path


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_accepts_its_recipe(certificate: Path) -> None:
    text = recipe("nginx").replace("/etc/nginx/", f"{certificate}/").replace("listen 443", "listen 127.0.0.1:18443")
    temporary = "".join(
        f"{kind}_temp_path {certificate}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (certificate / "nginx.conf").write_text(
        f"pid {certificate}/pid; error_log stderr; events {{}}\nhttp {{ access_log off; {temporary}\n{text} }}"
    )
    command = ["nginx", "-t", "-q", "-p", str(certificate), "-c", str(certificate / "nginx.conf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="HAProxy is not installed")
def test_haproxy_accepts_its_recipe(certificate: Path) -> None:
    (certificate / "haproxy.cfg").write_text(recipe("haproxy").replace("/etc/haproxy/", f"{certificate}/"))
    done = subprocess.run(["haproxy", "-c", "-f", str(certificate / "haproxy.cfg")], capture_output=True, text=True)
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
