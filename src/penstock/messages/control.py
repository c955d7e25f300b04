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


class WatchBlocks(msgspec.Struct, frozen=True, tag=True):
    """Report the blocks of the prefix cache from now on, beginning with all that it has (`BlockChanges`). The answer is
    Completed. Sent again, it begins anew."""


class Resize(msgspec.Struct, frozen=True, tag=True):
    """Use only this part of the memory that the engine has reserved for its KV cache, and give the rest back. What is
    only cached there is forgotten, and sequences with blocks there start over. The answer is Completed. Raises
    RequestRejected if one sequence of max_model_len would not fit, and EngineError for an engine on a GPU or with
    ranks."""

    share: float  # above 0, at most 1


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take no new requests, and end the engine when the last request has ended or left. The answer is Completed. Only
    for an engine that has a process of its own (`penstock engine`)."""

    grace: float = 0.0  # seconds that requests may stay; then their fronts move them to other engines


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Return what a front without the model's files needs. The answer is Description. Only for `penstock engine`."""


class Completed(msgspec.Struct, frozen=True, tag=True):
    """The message was executed."""


class ForgottenBlocks(msgspec.Struct, frozen=True, tag=True):
    """The number of cached blocks that no sequence held when the prefix cache was emptied."""

    blocks: tuple[int, ...]  # per KV group


class TextFile(msgspec.Struct, frozen=True):
    """A file that the tokenizer, the chat template or the configuration is in."""

    name: str  # without a folder
    content: bytes  # of a GGUF file: its header
    size: int  # of the whole file


class Description(msgspec.Struct, frozen=True, tag=True):
    """An engine's model, as a front serves it."""

    model: str  # the name that fronts give it by default
    answers: bytes  # JSON of prepare.model.AnswerSettings
    files: tuple[TextFile, ...]
    of_folder: bool  # the model is a folder; else it is the one file


ControlMessage = ResetCache | Sleep | Wake | WatchBlocks | Resize | Drain | Describe
ControlAnswer = Completed | ForgottenBlocks | Description
