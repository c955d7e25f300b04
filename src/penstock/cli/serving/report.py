"""Prints the start and the end of `penstock serve`."""

import logging
import socket
import time
from io import StringIO
from typing import TYPE_CHECKING

from penstock.cli.address import url_of
from penstock.families import load_end_tokens
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.config import Resolved
    from penstock.frontend.http.tls import TLS
    from penstock.messages import EngineInfo
    from penstock.prepare.model import PreparedModel

log = logging.getLogger("penstock.serve")


def log_start(
    prepared: "PreparedModel",
    info: "EngineInfo",
    sock: socket.socket,
    grpc: tuple[str, int] | None,
    tls: "TLS | None",
    started: float,
) -> None:
    """Logs what was started, when it answers requests."""
    resolved = prepared.resolved
    for line in _contents(resolved, info):
        log.info(line)
    ranks, cores = resolved.engine.split.world, prepared.hardware.cores
    if ranks > cores and resolved.engine.device == "cpu" and resolved.engine.distributed_executor != "ray":
        log.warning("%d ranks share %d cores and wait for each other: fewer ranks are faster", ranks, cores)
    if prepared.generation:
        values = ", ".join(f"{name} {value:g}" for name, value in prepared.generation.items())
        log.info(
            "sampling of requests that do not set it: %s (from the model; --generation-config none turns it off)",
            values,
        )
    if prepared.spec.pooling is None:
        log.info("answers end at %s", _end_tokens(prepared))
    if tls is not None:
        log.info("TLS certificate: %s", tls.certificate)
    seconds, url = time.monotonic() - started, url_of(sock, tls=tls is not None)
    log.info("serving %s on %s, ready after %.1f s", resolved.server.served_model_name, url, seconds)
    if grpc is not None:
        log.info("KServe's gRPC service is on %s:%d", *grpc)
    log.info("open it in a browser to try it; OpenAI's API is at /v1, metrics at /metrics; Ctrl-C stops the server")


def show_memory(resolved: "Resolved") -> None:
    """Shows the memory table, or logs its rows as one object."""
    if resolved.server.log_format == "text":
        from rich.console import Console

        from penstock.cli.memory_table import memory_table
        from penstock.observe.stderr import complain

        text, stderr = StringIO(), Console(stderr=True)
        console = Console(file=text, width=stderr.width, force_terminal=stderr.is_terminal)
        console.print(memory_table(resolved, f"Memory for {resolved.engine.name}"))
        complain(text.getvalue().removesuffix("\n"))  # a server starts even if its log cannot be written
    else:
        sizes = {row.name: row.bytes for row in resolved.memory.rows}
        fields = {"model": resolved.engine.name, "bytes": sizes}
        log.info("memory", extra={"fields": fields})


def show_end(resolved: "Resolved", error: Exception) -> None:
    """Shows why the server ended, in one line."""
    if resolved.server.log_format == "text":
        from penstock.observe.stderr import complain

        complain(f"penstock: {error}")
    else:
        log.error("%s", error)


def _contents(resolved: "Resolved", info: "EngineInfo") -> list[str]:
    """Returns lines about what was started and what it can hold."""
    required = resolved.server.api_key or resolved.server.api_key_file
    key = "clients must send the API key" if required else "no API key is required"
    tokens = (min(info.num_blocks) - 1) * info.block_size  # block 0 is the null page
    return [
        f"penstock {__version__}: {resolved.engine.name}, computed in {info.dtype}; {key}",
        f"KV cache: {tokens:,} tokens in {resolved.engine.kv_dtype}; at most {info.max_model_len:,} "
        f"in a request, {info.max_num_seqs} sequences at a time",
    ]


def _end_tokens(prepared: "PreparedModel") -> str:
    """Returns the tokens that end an answer, each with the files that name it."""
    tokens = [
        f"{token.text or 'token'} ({token.id}: {', '.join(token.files)})" for token in load_end_tokens(prepared.path)
    ]
    return " or ".join(tokens) or "max_tokens only: no file of the model names a token"
