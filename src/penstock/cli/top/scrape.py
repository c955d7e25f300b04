"""Reads the metrics of a server."""

import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

SECONDS = 10.0  # for an answer
MAX_BYTES = 16 << 20  # of an answer
_OURS = ("penstock_", "process_")

Labels = tuple[tuple[str, str], ...]


class NoServer(OSError):
    """No Penstock server answers there. The message is one line that says what to change."""


@dataclass(frozen=True)
class Scrape:
    """The samples of one scrape: for each name, values by labels. `moment` is when, on time.monotonic()."""

    moment: float
    samples: dict[str, dict[Labels, float]]

    @property
    def models(self) -> list[str]:
        """The names of the models that are served."""
        return [dict(labels)["model_name"] for labels in self.samples.get("penstock_engine_healthy", ())]

    def value(self, name: str, **labels: str) -> float | None:
        """The sum of the samples that have these labels; None if there are none."""
        wanted = labels.items()
        found = [value for own, value in self.samples.get(name, {}).items() if wanted <= dict(own).items()]
        return sum(found) if found else None

    def buckets(self, name: str, model: str) -> dict[float, float]:
        """A histogram's cumulative counts by upper bound."""
        series = self.samples.get(f"{name}_bucket", {})
        return {float(dict(own)["le"]): value for own, value in series.items() if ("model_name", model) in own}


def server_url(text: str) -> str:
    """The URL of a server, without /metrics. Raises ValueError."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        right = False
    if not right:
        raise ValueError(f"{text!r} is not a server's address; write for example http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/metrics").rstrip("/")


def scrape(url: str, api_key: str | None) -> Scrape:
    """Reads the metrics of the server at `url`. Raises NoServer."""
    request = urllib.request.Request(f"{url}/metrics")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            body = answer.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        remedy = "; set PENSTOCK_API_KEY to a key that it accepts" if error.code in (401, 403) else ""
        raise NoServer(
            f"{url}/metrics answers with status {error.code}{remedy or ': is it a Penstock server?'}"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # a URLError has the reason inside
        raise NoServer(no_answer(url, error)) from None
    if len(body) > MAX_BYTES:
        raise NoServer(f"{url}/metrics has more than {MAX_BYTES >> 20} MiB: is it a Penstock server?")
    found = parse(body.decode("utf-8", "replace"))
    if not any(name.startswith("penstock_") for name in found.samples):
        raise NoServer(f"{url}/metrics has no metrics of Penstock: is it a Penstock server?")
    return found


def parse(text: str) -> Scrape:
    """The samples in an exposition. Lines that are none of ours are left out. Raises NoServer."""
    from prometheus_client.parser import text_string_to_metric_families

    moment = time.monotonic()
    ours = "\n".join(line for line in text.splitlines() if line.startswith(_OURS))
    samples: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(ours + "\n"):
            for sample in family.samples:
                samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise NoServer(f"the metrics cannot be read: {error}") from None
    return Scrape(moment, samples)


def no_answer(url: str, error: Exception) -> str:
    """The message for a request that got no answer, with what to do about it."""
    inner = _cause(error)
    if isinstance(inner, ssl.SSLCertVerificationError):
        remedy = "set SSL_CERT_FILE to a file with the certificate, if you trust it"
        if "mismatch" in inner.verify_message or "not valid for" in inner.verify_message:
            remedy = "use the address that the certificate names"
        return f"{url} has a certificate that cannot be verified ({inner.verify_message}): {remedy}"
    if isinstance(inner, ssl.SSLError):
        return f"{url} does not speak TLS ({why_no_answer(error)}): write http:// if the server has no certificate"
    if url.startswith("http:") and isinstance(inner, http.client.HTTPException | ConnectionResetError):
        return f"{url} does not speak HTTP ({why_no_answer(error)}): write https:// if the server has a certificate"
    return f"{url} does not answer ({why_no_answer(error)}): is a server running there?"


def _cause(error: Exception) -> Any:
    """The reason inside a URLError. It may be a text."""
    return error.reason if isinstance(error, urllib.error.URLError) else error


def why_no_answer(error: Exception) -> str:
    """The reason of a request's failure, in a few words."""
    inner = _cause(error)
    code = getattr(inner, "errno", None)
    if isinstance(inner, OSError) and code and code > 0 and not hasattr(inner, "verify_message"):
        return os.strerror(code)
    return str(getattr(inner, "verify_message", "") or getattr(inner, "strerror", "") or inner or type(inner).__name__)
