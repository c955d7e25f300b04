"""Prints the start and the end of `penstock serve`."""

import logging
import socket
import time
from typing import TYPE_CHECKING

from penstock.cli.address import url_of
from penstock.config import format_bytes
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
    for line in _contents(prepared, info):
        log.info(line)
    if prepared.hardware.promised:
        left = format_bytes(prepared.hardware.promised)
        log.info("other servers on this machine may still take %s: this one is sized for the rest", left)
    ranks, cores = resolved.engine.split.world, prepared.hardware.cores
    if ranks > cores and resolved.engine.device == "cpu" and resolved.engine.distributed_executor != "ray":
        log.warning("%d ranks share %d cores and wait for each other: fewer ranks are faster", ranks, cores)
    if prepared.generation:
        values = ", ".join(f"{name} {value:g}" for name, value in prepared.generation.items())
        log.info(
            "unless a request says otherwise: %s (the model recommends it; --generation-config none turns it off)",
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
    """Logs what the server takes of the memory, in one line or, as JSON, row by row."""
    sizes = {row.name: row.bytes for row in resolved.memory.rows}
    if resolved.server.log_format != "text":
        log.info("memory", extra={"fields": {"model": resolved.engine.name, "bytes": sizes}})
        return
    cache, free = sizes["KV cache"], sizes["free"]
    where = " of each rank" if len(resolved.ranks) > 1 else ""
    parts = f"{format_bytes(sum(sizes.values()) - cache - free)} for the model"
    if cache:
        taken = ", taken as it is used" if resolved.engine.device == "cpu" else ""
        parts += f" and up to {format_bytes(cache)} for conversations (the KV cache{taken})"
    log.info("memory%s: %s; penstock plan shows more", where, parts)


def show_end(resolved: "Resolved", error: Exception) -> None:
    """Shows why the server ended, in one line."""
    if resolved.server.log_format == "text":
        from penstock.observe.stderr import complain

        complain(f"penstock: {error}")
    else:
        log.error("%s", error)


def _contents(prepared: "PreparedModel", info: "EngineInfo") -> list[str]:
    """Returns lines about what was started and what it can hold."""
    resolved, server = prepared.resolved, prepared.resolved.server
    key = "clients must send the API key" if server.api_key or server.api_key_file else "no API key is required"
    if server.tenants:
        key = f"API keys are those of {server.tenants}"
    tokens = (min(info.num_blocks) - 1) * info.block_size  # block 0 is the null page
    holds = (
        f"room for {tokens:,} tokens of prompts and answers; at most {info.max_model_len:,} in a request, and "
        f"{info.max_num_seqs} answers at a time"
    )
    if prepared.spec.pooling is not None:
        holds = f"texts of at most {info.max_model_len:,} tokens, {info.max_num_seqs} at a time"
    return [f"penstock {__version__}: {resolved.engine.name}, computed in {info.dtype}; {key}", holds]


def _end_tokens(prepared: "PreparedModel") -> str:
    """Returns the tokens that end an answer, each with the files that name it."""
    tokens = [
        f"{token.text or 'token'} ({token.id}: {', '.join(token.files)})" for token in load_end_tokens(prepared.path)
    ]
    return " or ".join(tokens) or "max_tokens only: no file of the model names a token"
