"""Encodes long prompts in processes that can be killed.

A tokenizer's library cannot be interrupted, and takes seconds for some texts of megabytes.
"""

import logging
import threading
from pathlib import Path

import msgspec

from penstock.text.errors import ChatTemplateError, TokenizerError
from penstock.text.process import WorkerProcess
from penstock.text.prompts.encoder import PromptEncoder, PromptTooLong
from penstock.text.prompts.questions import Encoded, PromptQuestion, PromptSetup, Refused
from penstock.text.tokenizer import Tokenizer

SECONDS = 10.0  # of processor time, for a prompt
WALL_SECONDS = 120.0  # for a process that gets no processor time
_ERRORS = {error.__name__: error for error in (TokenizerError, PromptTooLong, ChatTemplateError)}

log = logging.getLogger(__name__)


class PromptTooSlow(ValueError):
    """A process was killed over this prompt."""


class PromptWorkers:
    """Threads can share it: there are as many processes as threads that call at once. Each is started when first needed
    and loads the tokenizer, which takes about a second."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: PromptEncoder,
        max_model_len: int,
        *,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
        seconds: float = SECONDS,
    ) -> None:
        self._encoder = encoder
        self._seconds = seconds
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []
        self._closed = False
        self._setup: bytes | None = None  # None: there are no processes
        if tokenizer.path is not None:
            path, state = str(Path(tokenizer.path).resolve()), tokenizer.files_state
            setup = PromptSetup(path, state, tool_format, reasoning_format, max_model_len, seconds)
            self._setup = msgspec.json.encode(setup)

    def encode(self, question: PromptQuestion) -> Encoded:
        """As PromptEncoder.encode; it also raises PromptTooSlow and WorkerEnded. Blocks. Without a process, such as
        when the tokenizer's files have changed, this thread does the work."""
        try:
            line = msgspec.json.encode(question)
        except UnicodeEncodeError:  # an unpaired surrogate, which the tokenizer refuses
            return self._encoder.encode(question)
        process = self._take()
        if process is None:
            return self._encoder.encode(question)
        answer = process.ask_blocking(line, WALL_SECONDS)
        if not answer:
            raise PromptTooSlow(
                f"takes more than {self._seconds:g} s of processor time, or too much memory, to tokenise; shorten it"
            )
        with self._lock:
            kept = not self._closed
            if kept:
                self._idle.append(process)
        if not kept:
            process.kill()
        found = msgspec.json.decode(answer, type=Encoded | Refused)
        if isinstance(found, Refused):
            raise _ERRORS[found.error](found.message)
        return found

    def close(self) -> None:
        """Ends the processes: the idle ones now, the others after their prompts."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()

    def _take(self) -> WorkerProcess | None:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.runs:
                    return process
                process.kill()
        if self._setup is None:
            return None
        try:
            return WorkerProcess(self._setup)
        except (OSError, RuntimeError) as error:  # WorkerEnded is one
            log.warning("long prompts are tokenised by threads, which cannot be stopped: %s", error)
            self._setup = None
            return None
