"""Keeps a server's threads off the processor of an engine's loop."""

import contextlib
from collections.abc import Iterator
from typing import Any

from penstock.engine.processors import keep_off
from penstock.frontend.versions.versions import Versions
from penstock.messages import EngineInfo


@contextlib.contextmanager
def off_the_loop(versions: Versions[Any]) -> Iterator[None]:
    """Keeps all threads of this process off the processor that the loop of the current version's engine stays on: the
    engine of the next version may have another one, or none."""
    with contextlib.ExitStack() as kept:

        def move(info: EngineInfo) -> None:
            kept.close()
            kept.enter_context(keep_off(info.cpu))

        move(versions.current.model.client.info)
        versions.on_exchange = move
        yield
