"""A model as the frontend knows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from penstock.messages import EngineClient
from penstock.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A name, the engine that answers to it, and what turns its tokens into text.

    `defaults` are sampling values for requests that leave them out, named as in `SamplingParams`: what a checkpoint's
    generation_config.json advises. `created` is in seconds since the epoch.
    """

    name: str
    client: EngineClient
    tokenizer: Tokenizer
    created: int
    aliases: tuple[str, ...] = ()
    defaults: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def answers_to(self, name: str) -> bool:
        return name == self.name or name in self.aliases

    @property
    def max_model_len(self) -> int:
        return self.client.info.max_model_len
