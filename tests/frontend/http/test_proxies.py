"""The client's address behind proxies: a header is believed only if a trusted proxy sent it."""

import logging
from collections.abc import Callable

import pytest

from penstock.config import ConfigError, read_settings
from penstock.frontend.http.proxies import TrustedProxies
from tests.frontend.conftest import Site

TRUSTED = ("127.0.0.1", "10.0.0.0/8", "::1")


@pytest.mark.parametrize(
    ("peer", "headers", "client"),
    [
        ("127.0.0.1", [b"203.0.113.7"], "203.0.113.7"),
        ("127.0.0.1", [], "127.0.0.1:5"),
        ("::ffff:127.0.0.1", [b"203.0.113.7"], "203.0.113.7"),
        ("::1", [b"2001:db8::1"], "2001:db8::1"),
        ("127.0.0.1", [b"203.0.113.7, 10.1.2.3"], "203.0.113.7"),  # two proxies
        ("127.0.0.1", [b"203.0.113.7", b"10.1.2.3"], "203.0.113.7"),
        ("127.0.0.1", [b"198.51.100.1, 203.0.113.7"], "203.0.113.7"),  # the client wrote the first one itself
        ("127.0.0.1", [b"forged words, 10.1.2.3"], "10.1.2.3"),
        ("127.0.0.1", [b"10.0.0.1," * 5000 + b"10.0.0.2"], "10.0.0.1"),
        ("203.0.113.9", [b"127.0.0.1"], "203.0.113.9:5"),  # no proxy of ours
        ("2001:db8::2", [b"127.0.0.1"], "[2001:db8::2]:5"),
    ],
)
def test_the_last_address_that_is_no_proxy(peer: str, headers: list[bytes], client: str) -> None:
    scope = {"client": (peer, 5), "headers": [(b"x-forwarded-for", value) for value in headers]}
    assert TrustedProxies(TRUSTED).client(scope) == client


def test_no_proxy_is_trusted_by_default() -> None:
    scope = {"client": ("127.0.0.1", 5), "headers": [(b"x-forwarded-for", b"203.0.113.7")]}
    assert TrustedProxies(()).client(scope) == "127.0.0.1:5"
    assert TrustedProxies(TRUSTED).client({"client": None, "headers": []}) == "unknown"


async def test_the_log_has_it(make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture) -> None:
    site = make_site(trusted_proxy=TRUSTED)
    with caplog.at_level(logging.INFO, "penstock.access"):
        await site.http.get("/v1/models", headers={"x-forwarded-for": "203.0.113.7"})
    (line,) = [record.fields for record in caplog.records if record.name == "penstock.access"]  # type: ignore[attr-defined]
    assert line["client"] == "203.0.113.7"


def test_a_wrong_address_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--trusted-proxy .* 'proxy.example' is no address and no network; give one"):
        read_settings(environ={"PENSTOCK_TRUSTED_PROXY": "127.0.0.1,proxy.example"})
    given = read_settings(environ={"PENSTOCK_TRUSTED_PROXY": "127.0.0.1, 10.0.0.0/8"})
    assert given.settings.model_dump()["trusted_proxy"] == ("127.0.0.1", "10.0.0.0/8")
