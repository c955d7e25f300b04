"""The grammars of an engine. Their tokenizer is loaded when the first request with a grammar comes."""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.config.engine import EngineConfig
from penstock.messages import Grammar

if TYPE_CHECKING:
    from penstock.text.grammars.matchers import GrammarMatcher, GrammarMatchers


class EngineGrammars:
    """Implements runtime's Grammars. The first call starts to load the tokenizer in another thread."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._loading: Future[GrammarMatchers] | None = None

    def prepare(self, grammar: Grammar) -> bool:
        """Raises TokenizerError if the model's tokenizer cannot be loaded."""
        loading = self._load()
        return loading.done() and loading.result().prepare(grammar)

    def matcher(self, grammar: Grammar, output_ids: Sequence[int]) -> "GrammarMatcher":
        return self._load().result().matcher(grammar, output_ids)

    def fill(self, wanted: "Sequence[tuple[GrammarMatcher, Sequence[int]]]", words: NDArray[np.int32]) -> None:
        self._load().result().fill(wanted, words)

    def close(self) -> None:
        """While the tokenizer is being loaded there is nothing to end but the thread that loads it, which then ends."""
        if self._loading is not None and self._loading.done() and self._loading.exception() is None:
            self._loading.result().close()

    def _load(self) -> "Future[GrammarMatchers]":
        if self._loading is None:
            thread = ThreadPoolExecutor(1, "grammars")
            self._loading = thread.submit(load_grammars, self._config, self._vocab_size)
            thread.shutdown(wait=False)
        return self._loading


def load_grammars(config: EngineConfig, vocab_size: int) -> "GrammarMatchers":
    """Loads the model's tokenizer for grammars. Raises TokenizerError."""
    from penstock.families import load_spec
    from penstock.text import Tokenizer
    from penstock.text.grammars.matchers import GrammarMatchers  # not above: an engine may never need them

    path = Path(config.model)
    threads = config.threads or len(os.sched_getaffinity(0))
    eos_token_ids = load_spec(path).eos_token_ids
    return GrammarMatchers(lambda: Tokenizer.load(path), vocab_size, eos_token_ids, threads=threads)
