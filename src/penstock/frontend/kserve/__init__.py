"""The wire of KServe's open inference protocol, version 2, with Triton's extensions."""

from collections.abc import Mapping

from penstock.frontend.describe import Operation
from penstock.frontend.kserve import answers
from penstock.frontend.kserve.errors import encode_error
from penstock.frontend.kserve.fields import GenerateFields, InferFields
from penstock.frontend.kserve.generate import read_generate, read_stream
from penstock.frontend.kserve.infer import read_infer, read_infer_stream
from penstock.frontend.kserve.models import (
    is_ready,
    list_repository,
    load,
    show_all_stats,
    show_config,
    show_model,
    show_server,
    show_stats,
    unload,
)
from penstock.frontend.kserve.rollouts import (
    FeedbackFields,
    RolloutFields,
    change_rollout,
    give_feedback,
    list_rollouts,
)
from penstock.frontend.kserve.shared_memory import (
    RegionFields,
    register_cuda_memory,
    register_memory,
    show_cuda_memory,
    show_memory,
    unregister_memory,
)

_EXAMPLE = {"text_input": "Water flows", "max_tokens": 32}
_TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Water flows"]}
OPERATIONS: Mapping[str, Operation] = {
    "show_server": Operation(summary="Show the server's name and version", shape=answers.SERVER),
    "list_repository": Operation(summary="List the models and their states", shape=answers.REPOSITORY),
    "is_ready": Operation(summary="Status 200 if the model can be used", shape=answers.READY),
    "show_all_stats": Operation(summary="The counts of all models", shape=answers.STATS),
    "show_stats": Operation(summary="The counts of a one-shot model", shape=answers.STATS),
    "show_config": Operation(summary="Show the model's configuration, as Triton does", shape=answers.CONFIG),
    "show_model": Operation(summary="Show the model's inputs and outputs", shape=answers.MODEL),
    "load": Operation(summary="Load a model of the repository", answer=None),
    "unload": Operation(summary="Unload a model of the repository", answer=None),
    "list_rollouts": Operation(summary="Show the last rollout of each model", shape=answers.ROLLOUTS),
    "change_rollout": Operation(
        summary="Begin, pause, resume or abort a rollout",
        request=RolloutFields,
        example={"action": "start", "candidate": 2},
        answer=None,
    ),
    "give_feedback": Operation(
        summary="Say what has turned out to be right for a request",
        shape={"used": bool},
        request=FeedbackFields,
        example={"model": "ranker", "request_id": "a1", "label": 1},
    ),
    "show_memory": Operation(summary="Show the shared memory of clients", shape=answers.REGIONS),
    "register_memory": Operation(
        summary="Register shared memory of a client",
        request=RegionFields,
        example={"key": "/input", "byte_size": 4096},
        answer=None,
    ),
    "unregister_memory": Operation(summary="Forget shared memory of a client", answer=None),
    "show_cuda_memory": Operation(summary="An empty list: memory of a GPU is not shared", shape=answers.REGIONS),
    "register_cuda_memory": Operation(summary="Refused: memory of a GPU is not shared", answer=None),
    "read_generate": Operation(
        summary="Continue a text", shape=answers.GENERATED, request=GenerateFields, example=_EXAMPLE
    ),
    "read_stream": Operation(
        summary="Continue a text in a stream", request=GenerateFields, example=_EXAMPLE, answer="text/event-stream"
    ),
    "read_infer": Operation(
        summary="Continue the text of a tensor",
        shape=answers.INFERRED,
        request=InferFields,
        example={"inputs": [_TENSOR]},
    ),
    "read_infer_stream": Operation(
        summary="Continue the text of a tensor in a stream",
        request=InferFields,
        example={"inputs": [_TENSOR]},
        answer="text/event-stream",
    ),
}
