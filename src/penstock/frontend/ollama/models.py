"""Ollama's routes about models."""

import asyncio
import hashlib
import math
import time
from datetime import UTC, datetime
from typing import Any

import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.errors import invalid
from penstock.frontend.http.asgi import Answer
from penstock.frontend.http.body import decode
from penstock.frontend.ollama.fields import SAMPLING_NAMES, ModelFields
from penstock.frontend.ollama.options import bare_name
from penstock.frontend.served import ServedModel
from penstock.frontend.store import StoredModel
from penstock.frontend.versions.serving import Serving

VERSION = "0.12.6"  # of the Ollama whose API this is: clients compare it
_NEVER = "2318-01-01T00:00:00Z"  # when the model is unloaded


async def greet(body: bytes, context: RequestContext) -> Answer:
    """Clients read this text to find out whether Ollama runs."""
    return Answer(b"Ollama is running", content_type=b"text/plain; charset=utf-8")


async def show_version(body: bytes, context: RequestContext) -> bytes:
    return orjson.dumps({"version": VERSION})


async def list_models(body: bytes, context: RequestContext) -> bytes:
    """The models' names, and the other models of the machine if clients may change them."""
    models = context.models
    names = models.names()
    absent = models.absent_names()
    stored = [] if context.store is None else await asyncio.to_thread(context.store.models)
    others = [_stored_fields(one) for one in stored if one.name not in names and one.name not in absent]
    others += [_stored_fields(StoredModel(name, 0, 0.0, "")) for name in absent]
    return orjson.dumps({"models": [*(_fields(models.find(name).model, name) for name in names), *others]})


async def list_running(body: bytes, context: RequestContext) -> bytes:
    """The models that have an engine."""
    running = []
    for served in context.models.all:
        if served.has_engine:
            model = served.model
            fields = {**_fields(model, model.name), "size_vram": 0, "context_length": model.max_model_len}
            running.append({**fields, "expires_at": _expires(served)})
    return orjson.dumps({"models": running})


def _expires(served: Serving) -> str:
    """When the model's engine ends, if no request comes."""
    if served.sleeps_after == math.inf:
        return _NEVER
    since = time.monotonic() if served.unused_since is None else served.unused_since
    return datetime.fromtimestamp(time.time() + since - time.monotonic() + served.sleeps_after, UTC).isoformat()


async def show_model(body: bytes, context: RequestContext) -> bytes:
    """Returns the facts about a model. Raises APIError 404 for one that is not served."""
    _, name = read_model(body)
    model = (await context.for_model(bare_name(name))).model
    template = model.tokenizer.chat_template
    capabilities = ["completion" if model.pooling is None else "embedding"]
    if model.remote is not None or (template is not None and model.chat_format.tools is not None):
        capabilities.append("tools")
    if model.tokenizer.infill is not None:
        capabilities.append("insert")
    if model.chat_format.reasoning is not None:
        capabilities.append("thinking")
    return orjson.dumps(
        {
            "modelfile": f"FROM {model.name}",
            "parameters": "\n".join(
                f"{name} {model.defaults[ours]}" for name, ours in SAMPLING_NAMES.items() if ours in model.defaults
            ),
            "template": "" if template is None else template.source,
            "details": _details(model),
            "model_info": {
                "general.architecture": model.family,
                "general.parameter_count": model.parameters,
                f"{model.family}.context_length": model.max_model_len,
            },
            "capabilities": capabilities,
            "modified_at": _created(model),
        }
    )


def read_model(body: bytes) -> tuple[ModelFields, str]:
    """The parameters of a request about a model, and the model's name. Raises APIError 400."""
    fields = decode(ModelFields, body)
    name = fields.model or fields.name
    if name is None:
        raise invalid("model is missing", "model", "missing_parameter")
    return fields, name


def _fields(model: ServedModel, name: str) -> dict[str, Any]:
    shown = name if ":" in name else f"{name}:latest"
    return {
        "name": shown,
        "model": shown,
        "modified_at": _created(model),
        "size": model.file_bytes,
        "digest": hashlib.sha256(f"{model.name}@{model.client.info.revision}".encode()).hexdigest(),
        "details": _details(model),
    }


def _stored_fields(model: StoredModel) -> dict[str, Any]:
    """A model that is not served. Its name is as `penstock serve` takes it."""
    details = dict.fromkeys(("parent_model", "format", "family", "parameter_size", "quantization_level"), "")
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": datetime.fromtimestamp(model.modified, UTC).isoformat(),
        "size": model.size,
        "digest": hashlib.sha256(f"{model.name}@{model.revision}".encode()).hexdigest(),
        "details": {**details, "families": []},
    }


def _details(model: ServedModel) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": model.file_format,
        "family": model.family,
        "families": [model.family],
        "parameter_size": _parameter_size(model.parameters),
        "quantization_level": model.quantization,
    }


def _parameter_size(count: int) -> str:
    """As Ollama writes it: 134.52M, 8.03B."""
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _created(model: ServedModel) -> str:
    return datetime.fromtimestamp(model.created, UTC).isoformat()
