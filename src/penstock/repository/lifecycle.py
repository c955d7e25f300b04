"""Decides what to load and unload, from what is wanted and what there is. A pure function: it loads nothing itself.

A version is absent, loading, ready, draining or failed. These rules hold:

- a version that is wanted and absent is loaded if its memory is free, else it waits;
- a version that is no longer wanted drains when all that is wanted of its model is ready: so a new version that fails
  to load leaves the one that serves;
- a version that drains is dropped when its last request has ended.
"""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

Key = tuple[str, int, str]  # a version: the model's name, the number, and the digest of its content
State = Literal["loading", "ready", "draining", "dropping", "failed"]


class Wanted(NamedTuple):
    """A version that should be ready."""

    key: Key
    size: int  # bytes that it needs


class Observed(NamedTuple):
    """A version that there is."""

    key: Key
    state: State
    size: int
    requests: int = 0  # in flight


class Action(NamedTuple):
    """What to do with a version. `wait` changes nothing: the version lacks `lacks` bytes."""

    kind: Literal["load", "drain", "drop", "wait"]
    key: Key
    lacks: int = 0


def reconcile(wanted: Sequence[Wanted], observed: Collection[Observed], free: int) -> list[Action]:
    """Returns what to do now. `free` are the bytes of memory that are available, without what is loading."""
    states = {each.key: each.state for each in observed}
    actions = []
    left = free - sum(each.size for each in observed if each.state == "loading")
    for each in wanted:
        if each.key in states:
            continue
        if each.size > left:
            actions.append(Action("wait", each.key, each.size - left))
        else:
            left -= each.size
            actions.append(Action("load", each.key))
    keys = {each.key for each in wanted}
    unsettled = {each.key[0] for each in wanted if states.get(each.key) != "ready"}
    for there in observed:
        if there.key in keys:
            continue
        if there.state == "ready" and there.key[0] not in unsettled:
            actions.append(Action("drain", there.key))
        elif (there.state == "draining" and not there.requests) or there.state == "failed":
            actions.append(Action("drop", there.key))
    return actions
