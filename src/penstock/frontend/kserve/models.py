"""KServe's routes about the server, its models and its repository."""

import base64
import binascii
from typing import Any

import msgspec
import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.errors import APIError, invalid
from penstock.frontend.http.asgi import Answer
from penstock.frontend.http.body import decode
from penstock.frontend.kserve.generate import VERSION, for_path, one_shot_model, repository_of
from penstock.frontend.kserve.infer import FLAGS, TEXTS
from penstock.messages.tensors import LoadFailed, TensorModels
from penstock.version import __version__

_PLATFORM = "penstock"
_INPUTS = dict.fromkeys(TEXTS, "BYTES") | dict.fromkeys(FLAGS, "BOOL")  # of a language model
_FILE = "file:"  # begins the name of a parameter that has a file of a model
_MAX_FILES = 256


class IndexFields(msgspec.Struct):
    """The body of a request for the index."""

    ready: bool = False


class LoadFields(msgspec.Struct):
    """The body of a request to load or unload a model."""

    parameters: dict[str, Any] = {}


async def show_server(body: bytes, context: RequestContext) -> bytes:
    extensions = ["generate", "model_configuration", "model_repository", "statistics"]
    if context.models.tensors is not None:
        extensions += ["binary_tensor_data", "classification", "model_repository(unload_dependents)"]
    if context.models.memory is not None:
        extensions.append("system_shared_memory")
    return orjson.dumps({"name": "penstock", "version": __version__, "extensions": extensions})


async def show_model(body: bytes, context: RequestContext) -> bytes:
    """The model's inputs and outputs. Raises APIError 404 for another model."""
    if (model := one_shot_model(context)) is not None:
        fields = model.metadata()
        if "version" not in context.path and context.models.tensors is not None:
            fields["versions"] = _versions(context.models.tensors, model.name)
        return orjson.dumps(fields)
    _, name = await for_path(context)
    inputs = [{"name": each, "datatype": kind, "shape": [1]} for each, kind in _INPUTS.items()]
    outputs = [{"name": "text_output", "datatype": "BYTES", "shape": [1]}]
    fields = {"name": name, "versions": [VERSION], "platform": _PLATFORM, "inputs": inputs, "outputs": outputs}
    return orjson.dumps(fields)


async def show_config(body: bytes, context: RequestContext) -> bytes:
    """Returns the part of Triton's model configuration that clients use. Raises APIError 404 for another model."""
    if (model := one_shot_model(context)) is not None:
        return orjson.dumps(model.config())
    _, name = await for_path(context)
    types = {"BYTES": "TYPE_STRING", "BOOL": "TYPE_BOOL"}
    inputs = [
        {"name": each, "data_type": types[kind], "dims": [1], "optional": each != "text_input"}
        for each, kind in _INPUTS.items()
    ]
    fields = {
        "name": name,
        "platform": _PLATFORM,
        "backend": _PLATFORM,
        "max_batch_size": 0,  # the inputs of a request have no batch dimension
        "input": inputs,
        "output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]}],
        "model_transaction_policy": {"decoupled": True},
    }
    return orjson.dumps(fields)


async def is_ready(body: bytes, context: RequestContext) -> bytes:
    """Status 200 if the model can be used. Raises APIError 404 for another model, and 503."""
    if (model := one_shot_model(context)) is not None:
        return orjson.dumps({"name": model.name, "ready": True})
    found, name = await for_path(context)
    if found.model.client.state.status in ("restarting", "ended"):
        raise APIError(503, f"model {name!r} is not ready", retry_after=context.limits.retry_after)
    return orjson.dumps({"name": name, "ready": True})


async def show_stats(body: bytes, context: RequestContext) -> bytes:
    """The counts of a one-shot model's versions. A language model has an entry without counts: those are metrics.
    Raises APIError 404 for another model."""
    if (model := one_shot_model(context)) is not None:
        if "version" in context.path or context.models.tensors is None:
            return orjson.dumps({"model_stats": [await model.statistics()]})
        all_versions = [each for each in context.models.tensors.ready() if each.name == model.name]
        return orjson.dumps({"model_stats": [await each.statistics() for each in all_versions]})
    _, name = await for_path(context)
    return orjson.dumps({"model_stats": [{"name": name, "version": VERSION}]})


async def show_all_stats(body: bytes, context: RequestContext) -> bytes:
    ours = [{"name": name, "version": VERSION} for name in context.models.names()]
    others = (
        [] if context.models.tensors is None else [await each.statistics() for each in context.models.tensors.ready()]
    )
    return orjson.dumps({"model_stats": [*ours, *others]})


async def list_repository(body: bytes, context: RequestContext) -> bytes:
    ready = decode(IndexFields, body).ready if body.strip() else False
    tensors = context.models.tensors
    rows = [] if tensors is None else await tensors.index(ready=ready)
    there = {row["name"] for row in rows}
    names = [name for name in context.models.names() if name not in there]
    return orjson.dumps(
        [*({"name": name, "version": VERSION, "state": "READY", "reason": ""} for name in names), *rows]
    )


async def load(body: bytes, context: RequestContext) -> Answer:
    """Loads a model of the repository. Without a repository, success: the model is loaded. Raises APIError 400, 403
    and 404."""
    tensors = repository_of(context)
    if tensors is None:
        await for_path(context)
        return Answer(b"")
    parameters = decode(LoadFields, body).parameters if body.strip() else {}
    config, files = None, {}
    for name, value in parameters.items():
        if not isinstance(value, str):
            raise invalid(f"parameter {name[:100]!r} must be a text", "parameters")
        if name == "config":
            config = value
        elif name.startswith(_FILE):
            files[name.removeprefix(_FILE)] = _file(name, value)
        else:
            raise invalid(
                f"unknown parameter {name[:100]!r}; the parameters are config and file:VERSION/FILE", "parameters"
            )
    if len(files) > _MAX_FILES:
        raise invalid(f"{len(files)} files came with the request; the limit is {_MAX_FILES}", "parameters")
    try:
        await tensors.load(context.path["model"], config, files or None)
    except LoadFailed as error:
        raise APIError(400, str(error), code="load_failed") from None
    return Answer(b"")


async def unload(body: bytes, context: RequestContext) -> Answer:
    """Unloads a model of the repository. Raises APIError 403 for another model, which stays loaded as long as the
    server runs; 404 for one that is not there."""
    tensors = repository_of(context)
    if tensors is None:
        _, name = await for_path(context)
        raise APIError(403, f"model {name!r} cannot be unloaded; stop the server")
    parameters = decode(LoadFields, body).parameters if body.strip() else {}
    try:
        await tensors.unload(context.path["model"], dependents=bool(parameters.get("unload_dependents")))
    except LoadFailed as error:
        raise APIError(400, str(error), code="unload_failed") from None
    return Answer(b"")


def _versions(tensors: TensorModels, name: str) -> list[str]:
    return sorted((each.version for each in tensors.ready() if each.name == name), key=int)


def _file(name: str, value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(f"parameter {name[:100]!r} is not base64", "parameters") from None
