"""Routes about rollouts: new versions of models that take over step by step."""

from typing import Annotated, Any, Literal

import msgspec
import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.errors import APIError
from penstock.frontend.http.asgi import Answer
from penstock.frontend.http.body import decode
from penstock.frontend.kserve.generate import NO_REPOSITORY, repository_of
from penstock.messages.tensors import LoadFailed, Rollouts, TensorModels

_MAX_TEXT = msgspec.Meta(min_length=1, max_length=256)


class RolloutFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that changes a rollout. All but `action` is for `start`."""

    action: Literal["start", "pause", "resume", "abort"]
    candidate: Annotated[int, msgspec.Meta(ge=1)] | None = None
    plan: list[int] | None = None  # shares in percent; 0: requests are copied, and the copies' answers thrown away
    hold: float | None = None  # seconds that a stage lasts, at least
    patience: float | None = None  # at most
    tolerances: dict[str, float] | None = None  # by judge


class FeedbackFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a label: what has turned out to be right for a request."""

    model: Annotated[str, _MAX_TEXT]
    request_id: Annotated[str, _MAX_TEXT]  # the id of the request
    label: int | list[float]


async def list_rollouts(body: bytes, context: RequestContext) -> bytes:
    """The last rollout of each model."""
    return orjson.dumps({"rollouts": await _rollouts_of(context.models.tensors).show()})


async def change_rollout(body: bytes, context: RequestContext) -> Answer:
    """Begins or changes a rollout. Raises APIError 400, 403 and 404."""
    fields, name = decode(RolloutFields, body), context.path["model"]
    rollouts = _rollouts_of(repository_of(context))
    rules = {each: getattr(fields, each) for each in ("plan", "hold", "patience", "tolerances")}
    given = {each: value for each, value in rules.items() if value is not None}
    try:
        if fields.action != "start":
            await rollouts.steer(name, fields.action)
        elif fields.candidate is None:
            raise LoadFailed("candidate is missing: give the number of a version")
        else:
            await rollouts.start(name, fields.candidate, given)
    except LoadFailed as error:
        raise APIError(400, str(error), code="rollout_failed") from None
    return Answer(b"")


async def give_feedback(body: bytes, context: RequestContext) -> bytes:
    """Whether the label is used: the request was compared, and its rollout runs. Raises APIError 400 and 404."""
    fields = decode(FeedbackFields, body)
    label: Any = fields.label
    used = await _rollouts_of(context.models.tensors).label(fields.model, fields.request_id, label)
    return orjson.dumps({"used": used})


def _rollouts_of(models: TensorModels | None) -> Rollouts:
    if models is None:
        raise APIError(404, NO_REPOSITORY)
    return models.rollouts
