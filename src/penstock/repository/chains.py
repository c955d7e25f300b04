"""Requests whose outputs go to other models of the same process, which can run with them as one batch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from penstock.messages.tensors import InferRequest
from penstock.repository.backend.wire import RunNext

if TYPE_CHECKING:
    from penstock.repository.batching import BatchedModel


class NextStep(msgspec.Struct, frozen=True, eq=False):
    """A model that takes outputs of the one before it."""

    batches: "BatchedModel"
    order: RunNext  # what its process gets


class ChainRequest(InferRequest, kw_only=True):
    """A request whose outputs go only to the first model of `then`, whose outputs go only to the next, and so on."""

    then: tuple[NextStep, ...]  # requests with the same object can run as one batch
    ran: int = 0  # how many of `then` ran with it; the result is that of the last one


def common_steps(requests: Sequence[InferRequest]) -> tuple[NextStep, ...]:
    """Returns the steps that follow all of these requests."""
    first = requests[0]
    if isinstance(first, ChainRequest) and all(getattr(each, "then", ()) is first.then for each in requests):
        return first.then
    return ()
