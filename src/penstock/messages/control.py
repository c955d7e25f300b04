"""Messages with which an operator controls an engine, and their answers.

To add a message, write its struct here, add it to `ControlMessage`, and add a case where it is executed: in
EngineCore._control (engine/core.py), or in the client that starts the engine (engine/client.py).
"""

import msgspec


class ResetCache(msgspec.Struct, frozen=True, tag=True):
    """Empty the prefix cache. Running sequences keep their blocks. The answer is ForgottenBlocks."""


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """End the engine to free its memory, until a request or `Wake` starts it again. The answer is Completed. Raises
    EngineError while requests are unfinished, and for an engine that cannot be started again."""


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Start an engine that sleeps. The answer is Completed, when the engine is ready. Raises EngineError if it does not
    start."""


class Completed(msgspec.Struct, frozen=True, tag=True):
    """The message was executed."""


class ForgottenBlocks(msgspec.Struct, frozen=True, tag=True):
    """The number of cached blocks that no sequence held when the prefix cache was emptied."""

    blocks: tuple[int, ...]  # per KV group


ControlMessage = ResetCache | Sleep | Wake
ControlAnswer = Completed | ForgottenBlocks
