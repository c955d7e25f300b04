"""A model that a server serves."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from penstock.config.facts import PoolingFacts
from penstock.frontend.offload import FewAtOnce
from penstock.messages import EngineClient
from penstock.observe.costs import CostModel
from penstock.text import GrammarChecker, Tokenizer
from penstock.text.calls import ChatFormat
from penstock.text.prompts import PromptEncoder, PromptWorkers

if TYPE_CHECKING:
    from penstock.frontend.providers.model import ProviderModel

PROMPT_WORKERS = 2  # processes that encode large prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A version of a model: its names, its engine and its tokenizer.

    `defaults` are sampling values for requests that do not set them, named as in `SamplingParams`. They come from the
    checkpoint's generation_config.json. `created` is in seconds since the epoch. The formats are names of
    `penstock.text.calls`, or auto or none.
    """

    name: str
    client: EngineClient
    tokenizer: Tokenizer
    created: int
    fingerprint: str = ""  # of the weights and all else that answers depend on; OpenAI's system_fingerprint
    aliases: tuple[str, ...] = ()
    defaults: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    pooling: PoolingFacts | None = None  # of a model that gives vectors; it generates no text
    truncate_embeddings: bool = False  # texts that are too long for vectors are cut, not refused
    thinking_budget: int | None = None  # most tokens of reasoning in an answer; None: any number
    costs: CostModel | None = None  # of the engine's steps; None: they are not estimated
    texts: str = ""  # digest of what answers depend on besides the engine, such as the tokenizer's files
    path: Path | None = None  # the folder or GGUF file that it was loaded from; None: it has no files
    file_bytes: int = 0  # of the model's files
    file_format: str = ""  # gguf or safetensors
    family: str = "penstock"
    parameters: int = 0
    quantization: str = ""  # of most weights, such as Q4_K_M, INT8 or BF16
    remote: "ProviderModel | None" = None  # of a model at a provider, which has no engine and no tokenizer here
    chat_format: ChatFormat = field(init=False, compare=False)
    grammars: GrammarChecker = field(init=False, compare=False)
    encoder: PromptEncoder = field(init=False, compare=False)
    prompt_workers: PromptWorkers = field(init=False, compare=False)
    large_prompts: FewAtOnce = field(init=False, compare=False)  # runs the calls of `prompt_workers`
    # Runs the calls of `grammars.check`, whose process checks one grammar at a time.
    grammar_checks: FewAtOnce = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown format."""
        info = self.client.info
        object.__setattr__(self, "grammars", GrammarChecker(self.tokenizer, info.vocab_size, info.eos_token_ids))
        chat_format = ChatFormat(self.tokenizer, self.tool_format, self.reasoning_format)
        object.__setattr__(self, "chat_format", chat_format)
        encoder = PromptEncoder(self.tokenizer, chat_format, info.max_model_len)
        object.__setattr__(self, "encoder", encoder)
        workers = PromptWorkers(
            self.tokenizer,
            encoder,
            info.max_model_len,
            tool_format=self.tool_format,
            reasoning_format=self.reasoning_format,
        )
        object.__setattr__(self, "prompt_workers", workers)
        object.__setattr__(self, "large_prompts", FewAtOnce(PROMPT_WORKERS))
        object.__setattr__(self, "grammar_checks", FewAtOnce(1))

    def with_client(self, client: EngineClient) -> "ServedModel":
        """Returns the same version with another client of its engine. It shares all else."""
        other = copy(self)
        object.__setattr__(other, "client", client)
        return other

    def close(self) -> None:
        """Ends the processes that check grammars and encode large prompts. The engine is not closed."""
        self.grammars.close()
        self.prompt_workers.close()

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use: its own, and its aliases."""
        return (self.name, *self.aliases)

    @property
    def max_model_len(self) -> int:
        return self.client.info.max_model_len
