"""Checks grammars in a process that can be stopped (text/worker.py), and remembers the answers."""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from penstock.messages import Grammar
from penstock.text.grammars.questions import DEADLINE, Checked, Setup, Source, SourceKind
from penstock.text.grammars.schema import MAX_BYTES, GrammarError
from penstock.text.process import WorkerProcess
from penstock.text.tokenizer import Tokenizer

CACHE_BYTES = 4 << 20  # of sources and answers
WALL_SECONDS = 10.0  # for a process that gets little processor time


class GrammarChecker:
    """Checks grammars, and remembers the latest. The first grammar starts the process."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._known: OrderedDict[Source, Checked] = OrderedDict()
        self._bytes = 0
        self._process: WorkerProcess | None = None

    def known(self, kind: SourceKind, text: str, trigger: str = "") -> Grammar | None:
        """As `check`, but returns None at once for a grammar that was not checked lately."""
        checked = self._known.get(Source(kind, text, trigger))
        return None if checked is None else _result(checked)

    async def check(self, kind: SourceKind, text: str, trigger: str = "") -> Grammar:
        """Returns the grammar as the engine is to read it. Takes up to about a second, and longer while the processor
        is busy. One caller at a time. If the caller is cancelled, the process is killed.

        Raises GrammarError for one that is wrong, too large, or too slow to compile, and WorkerEnded if the process
        was ended by something else: nothing is known of the grammar then.
        """
        size = len(text.encode(errors="replace")) + len(trigger)
        if size > MAX_BYTES:
            raise GrammarError(f"it has {size} bytes; the limit is {MAX_BYTES}: shorten it")
        if not self._eos_token_ids:
            raise GrammarError("this model has no end-of-sequence token, so its output cannot be held to a grammar")
        source = Source(kind, text, trigger)
        checked = self._known.get(source)
        if checked is None:
            checked = await self._ask(source)
            self._remember(source, checked)
        else:
            self._known.move_to_end(source)
        return _result(checked)

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _remember(self, source: Source, checked: Checked) -> None:
        self._known[source] = checked
        self._bytes += _size(source, checked)
        while self._bytes > CACHE_BYTES:
            self._bytes -= _size(*self._known.popitem(last=False))

    async def _ask(self, source: Source) -> Checked:
        try:
            line = msgspec.json.encode(source)
        except UnicodeEncodeError:
            return Checked(error="it has an unpaired surrogate, which is not valid Unicode")
        if self._process is None or not self._process.runs:
            import asyncio

            self.close()
            self._process = await asyncio.to_thread(WorkerProcess, self._setup())
        answer = b""
        try:
            answer = await self._process.ask(line, WALL_SECONDS)
        finally:
            if not answer:
                self._process = None
        if answer:
            return msgspec.json.decode(answer, type=Checked)
        error = f"it takes more than {DEADLINE:g} s of processor time, or too much memory, to compile; simplify it"
        return Checked(error=error)

    def _setup(self) -> bytes:
        special = {i: self._tokenizer.token(i) for i in self._tokenizer.special_ids if i < self._vocab_size}
        eos = self._eos_token_ids[0]
        special.setdefault(eos, "<|end of sequence|>")
        return msgspec.json.encode(Setup(self._vocab_size, eos, special))


def _result(checked: Checked) -> Grammar:
    if checked.grammar is None:
        raise GrammarError(checked.error)
    return checked.grammar


def _size(source: Source, checked: Checked) -> int:
    grammar = checked.grammar
    return 4 * (len(source.text) + len(checked.error) + (0 if grammar is None else len(grammar.text))) + 1000
