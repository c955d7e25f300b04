"""Checks grammars in a process that can be stopped (worker.py), and remembers the answers."""

import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from penstock.messages import Grammar
from penstock.text.grammars.questions import DEADLINE, Checked, Setup, Source, SourceKind
from penstock.text.grammars.schema import MAX_BYTES, GrammarError
from penstock.text.tokenizer import Tokenizer

CACHE_BYTES = 4 << 20  # of sources and answers
START_SECONDS = 30.0  # for the process to start, on a busy machine
GRACE = 1.0  # seconds beyond the deadline before a process that does not end by itself is killed


class GrammarChecker:
    """Threads can share it. The process is started by the first grammar."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._known: OrderedDict[Source, Checked] = OrderedDict()
        self._bytes = 0
        self.waiting = 0  # calls of `check` that have not returned
        self._process: subprocess.Popen[bytes] | None = None

    def known(self, kind: SourceKind, text: str, trigger: str = "") -> Grammar | None:
        """As `check`, but returns None at once for a grammar that was not checked lately."""
        checked = self._known.get(Source(kind, text, trigger))
        return None if checked is None else _result(checked)

    def check(self, kind: SourceKind, text: str, trigger: str = "") -> Grammar:
        """Returns the grammar as the engine is to read it. Takes up to about a second, and longer while others wait.

        Raises GrammarError for one that is wrong, too large, or too slow to compile.
        """
        size = len(text.encode(errors="replace")) + len(trigger)
        if size > MAX_BYTES:
            raise GrammarError(f"it has {size} bytes; the limit is {MAX_BYTES}: shorten it")
        if not self._eos_token_ids:
            raise GrammarError("this model has no end-of-sequence token, so its output cannot be held to a grammar")
        source = Source(kind, text, trigger)
        self.waiting += 1
        try:
            with self._lock:
                checked = self._known.get(source)
                if checked is None:
                    checked = self._ask(source)
                    self._remember(source, checked)
                else:
                    self._known.move_to_end(source)
        finally:
            self.waiting -= 1
        return _result(checked)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _remember(self, source: Source, checked: Checked) -> None:
        self._known[source] = checked
        self._bytes += _size(source, checked)
        while self._bytes > CACHE_BYTES:
            self._bytes -= _size(*self._known.popitem(last=False))

    def _ask(self, source: Source) -> Checked:
        try:
            line = msgspec.json.encode(source)
        except UnicodeEncodeError:
            return Checked(error="it has an unpaired surrogate, which is not valid Unicode")
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            answer = self._read(process, DEADLINE + GRACE)
        except (BrokenPipeError, TimeoutError):
            answer = b""
        if answer:
            return msgspec.json.decode(answer, type=Checked)
        self._stop()
        return Checked(error=f"it takes more than {DEADLINE:g} s or too much memory to compile; simplify it")

    def _start(self) -> None:
        self._stop()
        command = [sys.executable, "-m", "penstock.text.grammars.worker"]
        self._process = process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        special = {i: self._tokenizer.token(i) for i in self._tokenizer.special_ids if i < self._vocab_size}
        eos = self._eos_token_ids[0]
        special.setdefault(eos, "<|end of sequence|>")
        process.stdin.write(msgspec.json.encode(Setup(self._vocab_size, eos, special)) + b"\n")
        # An empty regular expression: answered when the process is ready, so that starting it is not on the deadline.
        process.stdin.write(msgspec.json.encode(Source("regex", "a")) + b"\n")
        process.stdin.flush()
        if not self._read(process, START_SECONDS):
            raise RuntimeError("the process that checks grammars did not start; the log has its error")

    def _read(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        """A line of the process; empty if it has ended. TimeoutError if none comes in time."""
        assert process.stdout is not None
        end, data = time.monotonic() + seconds, b""
        while not data.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise TimeoutError
            part = process.stdout.read1(1 << 20)  # type: ignore[attr-defined]
            if not part:
                return b""
            data += part
        return data

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _result(checked: Checked) -> Grammar:
    if checked.grammar is None:
        raise GrammarError(checked.error)
    return checked.grammar


def _size(source: Source, checked: Checked) -> int:
    grammar = checked.grammar
    return 4 * (len(source.text) + len(checked.error) + (0 if grammar is None else len(grammar.text))) + 1000
