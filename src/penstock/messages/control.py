"""What an operator may have an engine do beside requests: one struct for each, and its answer.

A new one is a class here, in `ControlMessage`, and a case where it is executed: in the engine's loop, or in the client
that holds the engine.
"""

import msgspec


class ResetCache(msgspec.Struct, frozen=True, tag=True):
    """Forget which tokens the blocks of the prefix cache hold. Running sequences keep theirs. The answer is
    ForgottenBlocks."""


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """End the engine to give its memory back, until a request or `Wake`. The answer is Completed. Raises EngineError
    while requests are open, and for an engine that cannot be started again."""


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Start an engine that sleeps. The answer is Completed, once the engine is ready. Raises EngineError if it does not
    start."""


class Completed(msgspec.Struct, frozen=True, tag=True):
    """The message was executed."""


class ForgottenBlocks(msgspec.Struct, frozen=True, tag=True):
    """The blocks that no sequence held, and that were kept for their content."""

    blocks: tuple[int, ...]  # per KV group


ControlMessage = ResetCache | Sleep | Wake
ControlAnswer = Completed | ForgottenBlocks
