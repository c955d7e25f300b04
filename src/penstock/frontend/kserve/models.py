"""KServe's routes about the server and its models, which are always loaded."""

import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.errors import APIError
from penstock.frontend.http.asgi import Answer
from penstock.frontend.kserve.generate import VERSION, for_path
from penstock.frontend.kserve.infer import FLAGS, TEXTS
from penstock.version import __version__

_PLATFORM = "penstock"


async def show_server(body: bytes, context: RequestContext) -> bytes:
    extensions = ["generate", "model_configuration", "model_repository", "statistics"]
    return orjson.dumps({"name": "penstock", "version": __version__, "extensions": extensions})


async def show_model(body: bytes, context: RequestContext) -> bytes:
    """The model's inputs and outputs. Raises APIError 404 for another model."""
    _, name = await for_path(context)
    inputs = [
        {"name": name, "datatype": datatype, "shape": [1]}
        for names, datatype in ((TEXTS, "BYTES"), (FLAGS, "BOOL"))
        for name in names
    ]
    return orjson.dumps(
        {
            "name": name,
            "versions": [VERSION],
            "platform": _PLATFORM,
            "inputs": inputs,
            "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1]}],
        }
    )


async def show_config(body: bytes, context: RequestContext) -> bytes:
    """Returns the part of Triton's model configuration that clients use. Raises APIError 404 for another model."""
    _, name = await for_path(context)
    inputs = [
        {"name": name, "data_type": kind, "dims": [1], "optional": name != "text_input"}
        for names, kind in ((TEXTS, "TYPE_STRING"), (FLAGS, "TYPE_BOOL"))
        for name in names
    ]
    return orjson.dumps(
        {
            "name": name,
            "platform": _PLATFORM,
            "backend": _PLATFORM,
            "max_batch_size": 0,  # the inputs of a request have no batch dimension
            "input": inputs,
            "output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]}],
            "model_transaction_policy": {"decoupled": True},
        }
    )


async def is_ready(body: bytes, context: RequestContext) -> bytes:
    """Status 200 if the model can be used. Raises APIError 404 for another model, and 503."""
    found, name = await for_path(context)
    if found.model.client.state.status in ("restarting", "ended"):
        raise APIError(503, f"model {name!r} is not ready", retry_after=context.limits.retry_after)
    return orjson.dumps({"name": name, "ready": True})


async def show_stats(body: bytes, context: RequestContext) -> bytes:
    """The model's entry without counts: those are metrics. Raises APIError 404 for another model."""
    _, name = await for_path(context)
    return orjson.dumps({"model_stats": [{"name": name, "version": VERSION}]})


async def list_repository(body: bytes, context: RequestContext) -> bytes:
    names = context.models.names()
    return orjson.dumps([{"name": name, "version": VERSION, "state": "READY", "reason": ""} for name in names])


async def load(body: bytes, context: RequestContext) -> Answer:
    """Success: the model is loaded. Raises APIError 404 for another model."""
    await for_path(context)
    return Answer(b"")


async def unload(body: bytes, context: RequestContext) -> Answer:
    """Raises APIError 403: the model stays loaded, as long as the server runs. 404 for another model."""
    _, name = await for_path(context)
    raise APIError(403, f"model {name!r} cannot be unloaded; stop the server")
