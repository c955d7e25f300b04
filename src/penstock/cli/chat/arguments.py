"""Decides which words of the command line are the model and which are the prompt."""

import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

MAX_INPUT_BYTES = 16 << 20

_NAME = re.compile(r"[A-Za-z0-9._:/~-]+")  # names of models have only these characters; a prompt of one word may, too
_PATH = re.compile(r"(\.{0,2}|~)/\S*")


def split_arguments(words: Sequence[str], model: str | None, known: Sequence[str]) -> tuple[str | None, str | None]:
    """Returns the model, None for the default one, and the prompt, None if there is none.

    `model` is the value of --model; with it, all words are the prompt. `known` are the names of models. Raises
    ValueError if the first word could be either.
    """
    if model is not None or not words:
        return model, " ".join(words) if words else None
    first, rest = words[0], words[1:]
    if is_model(first, known):
        _refuse_text_file(first)
        return first, " ".join(rest) if rest else None
    if _NAME.fullmatch(first) and first[-1] not in ":.":  # no name ends so; "Summarise:" is a prompt
        raise ValueError(_unclear(first, rest, known))
    if rest:
        raise ValueError(
            f"{_short(first)} is not a model, and more words follow: name the model before the prompt, or put quotes "
            "around the whole prompt"
        )
    return None, first


def is_model(word: str, known: Sequence[str]) -> bool:
    """True if `word` must be meant as a model: a known name, what exists or is written as a path, or a hub id."""
    if word in known:
        return True
    if not word or "\n" in word or len(word) > 4096:
        return False
    if _is_gguf(word) or _PATH.fullmatch(word) or _exists(word):
        return True
    return "/" in word and _NAME.fullmatch(word) is not None


def read_input(stream: IO[bytes]) -> str:
    """Returns the text of standard input. Raises ValueError if it is too long or not UTF-8."""
    data = stream.read(MAX_INPUT_BYTES + 1)
    if len(data) > MAX_INPUT_BYTES:
        raise ValueError(f"standard input has more than {MAX_INPUT_BYTES >> 20} MiB; send less")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"standard input is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}; send text"
        ) from None


def join_prompt(prompt: str | None, piped: str, *, raw: bool) -> str:
    """Returns the prompt with the piped text below it. With `raw`, both stay exactly as they are."""
    if raw:
        return (prompt or "") + piped
    return "\n\n".join(part for part in (prompt or "", piped.strip("\n")) if part.strip())


def piped_input(prompt_given: bool) -> str | None:
    """Returns what is piped into this process, or None if standard input is a terminal.

    If the pipe stays open and empty, a note says after a second that the command reads it.
    """
    if sys.stdin is None:  # closed
        return ""
    if sys.stdin.isatty():
        return None
    import threading

    note = threading.Timer(1.0, _note_reading, (prompt_given,))
    note.daemon = True
    note.start()
    try:
        return read_input(sys.stdin.buffer)
    finally:
        note.cancel()


def _refuse_text_file(word: str) -> None:
    """Raises ValueError for a file that is probably meant as the prompt."""
    if not _is_gguf(word) and Path(word).expanduser().is_file():
        raise ValueError(f"{_short(word)} is a file, but no model: to send its text, use penstock run < {word}")


def _unclear(word: str, rest: Sequence[str], known: Sequence[str]) -> str:
    shown = _short(word)
    near = [name for name in known if word.lower() in name.lower()]
    near = near or difflib.get_close_matches(word.lower(), known, n=3, cutoff=0.5)
    meant = f"Did you mean {' or '.join(near[:3])}? " if near else ""
    model = known[0] if known else "MODEL"
    if rest:
        return (
            f"there is no model {shown}. {meant}If the words are a prompt, put quotes around them: "
            f'penstock run "{_inner(" ".join([word, *rest]))}"'
        )
    prompt = word if len(word) <= 60 else "PROMPT"
    return f"there is no model {shown}. {meant}If it is a prompt, name the model too: penstock run {model} {prompt}"


def _short(word: str) -> str:
    return repr(word if len(word) <= 60 else word[:59] + "…")


def _inner(text: str) -> str:
    text = " ".join(text.split()).replace('"', "'")
    return text if len(text) <= 60 else text[:59] + "…"


def _is_gguf(word: str) -> bool:
    return word.lower().endswith(".gguf")


def _exists(word: str) -> bool:
    try:
        return Path(word).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a null character
        return False


def _note_reading(prompt_given: bool) -> None:
    if sys.stderr.isatty():
        close = "; to leave it out, add </dev/null" if prompt_given else ""
        print(f"reading the prompt from standard input, up to its end{close}", file=sys.stderr, flush=True)
