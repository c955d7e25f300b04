"""A conversation: its messages, which of them fit in the context, and the file it is saved in."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.text.prompts import CHARS_PER_TOKEN

MAX_FILE_BYTES = 16 << 20
MAX_MESSAGES = 10_000

Message = dict[str, str]


class DoesNotFitContext(ValueError):
    """A prompt leaves no space for an answer, even without the earlier turns."""


@dataclass
class Conversation:
    """Messages by turns of the user and the assistant. The model does not see the first `forgotten` turns."""

    system: str | None = None  # None: the chat template's own, if it has one
    turns: list[tuple[str, str]] = field(default_factory=list)
    forgotten: int = 0
    system_source: str = "the command line"

    def messages(self, prompt: str | None = None, *, skip: int = 0) -> list[Message]:
        """Returns the messages without the first `skip` turns, and `prompt` as the last one."""
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for user, assistant in self.turns[skip:]:
            found += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return found if prompt is None else [*found, {"role": "user", "content": prompt}]

    def fit(self, prompt: str, encode: Callable[[Sequence[Message]], list[int]], context: int, space: int) -> list[int]:
        """Returns the token ids of the conversation with `prompt`, and forgets the oldest turns if it must.

        The ids leave at least `space` of the `context` tokens for the answer. Raises DoesNotFitContext if `prompt` and
        the system prompt alone are too long; nothing is forgotten then.
        """
        most = context - space
        longest = CHARS_PER_TOKEN * context
        if len(prompt) > longest:
            raise DoesNotFitContext(
                f"the prompt has {len(prompt)} characters, more than the {longest} that could fit in the context of "
                f"{context} tokens; shorten it"
            )
        low, high = self.forgotten, len(self.turns)
        chars = sum(len(user) + len(assistant) for user, assistant in self.turns[low:])
        while chars > longest:
            chars -= sum(map(len, self.turns[low]))
            low += 1
        ids = encode(self.messages(prompt, skip=low))
        if len(ids) <= most:
            self.forgotten = low
            return ids
        alone = encode(self.messages(prompt, skip=high))
        if len(alone) > most:
            with_system = " and the system prompt" if self.system else ""
            verb = "have" if self.system else "has"
            raise DoesNotFitContext(
                f"the prompt{with_system} {verb} {len(alone)} tokens; at most {most} fit in the context of {context}: "
                "shorten it, or start with a larger --max-model-len"
            )
        while low < high:  # the first number of turns to skip that is enough
            middle = (low + high) // 2
            ids = encode(self.messages(prompt, skip=middle))
            low, high = (low, middle) if len(ids) <= most else (middle + 1, high)
        self.forgotten = low
        return encode(self.messages(prompt, skip=low))

    def clear(self) -> None:
        """Forgets all turns. The system prompt stays."""
        self.turns, self.forgotten = [], 0

    def save(self, path: Path, model: str, *, overwrite: bool = False) -> None:
        """Writes a file that only its owner can read. It is valid as the body of a request to /v1/chat/completions.

        Raises ValueError if the file exists, unless `overwrite`, or cannot be written.
        """
        text = json.dumps({"model": model, "messages": self.messages()}, ensure_ascii=False, indent=2) + "\n"
        try:
            _write_private(path, text.encode(errors="surrogateescape"), overwrite)
        except FileExistsError:
            raise ValueError(f"{path} exists; /save -f {path} overwrites it") from None
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {str(error.strerror).lower()}") from None

    @staticmethod
    def load(path: Path) -> "Conversation":
        """Reads a file of `save`. Raises ValueError that says what is wrong with it."""
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {str(error.strerror).lower()}") from None
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB; a saved conversation has less")
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            raise ValueError(f"{path} is not JSON; name a file of /save") from None
        return _from_messages(path, content.get("messages") if isinstance(content, dict) else content)


def _write_private(path: Path, data: bytes, overwrite: bool) -> None:
    """Writes a new file, or replaces a file in one move, so that a full disk leaves the old one."""
    if path.exists() and not path.is_file():
        raise OSError(0, "it is not a file")
    if not overwrite:
        _write(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), path, data)
        return
    handle, name = tempfile.mkstemp(prefix=".penstock-", dir=path.parent)
    _write(handle, Path(name), data)
    os.replace(name, path)


def _write(handle: int, path: Path, data: bytes) -> None:
    try:
        with open(handle, "wb") as file:
            file.write(data)
    except BaseException:
        path.unlink()
        raise


def _from_messages(path: Path, messages: Any) -> Conversation:
    if not isinstance(messages, list):
        raise ValueError(f"{path} has no list of messages; name a file of /save")
    if len(messages) > MAX_MESSAGES:
        raise ValueError(f"{path} has {len(messages)} messages; at most {MAX_MESSAGES} are read")
    conversation = Conversation()
    texts: list[str] = []
    for number, message in enumerate(messages, 1):
        role = message.get("role") if isinstance(message, dict) else None
        text = message.get("content") if isinstance(message, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"{path}: message {number} has no text as its content")
        if number == 1 and role == "system":
            conversation.system, conversation.system_source = text, str(path)
            continue
        expected = "user" if len(texts) % 2 == 0 else "assistant"
        if role != expected:
            raise ValueError(f"{path}: message {number} has the role {str(role)[:40]!r}, but {expected!r} must follow")
        texts.append(text)
    if len(texts) % 2:
        raise ValueError(f"{path} ends with a message of the user; it must end with an answer")
    conversation.turns = list(zip(texts[::2], texts[1::2], strict=True))
    return conversation
