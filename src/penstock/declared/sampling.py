"""The sampling parameters: how the tokens of a request are chosen.

These are derived from the table: the checks of ranges and their errors, the OpenAPI document, the flags and `/set` of
`penstock run`, the values that are read from a model's recommendations, and the defaults and ranges on the pages.
messages/sampling.py has the types.

To add a parameter:

1. Add a row here. Add a line to `GivenSampling` in messages/sampling.py, from which the structs of all wires and of the
   library inherit, and a line to `SamplingParams` with the value that changes nothing.
2. If it leaves out tokens, add an array of its name to `SamplingRows` (kernels/batch_arrays.py), and to `SampleOp` in
   kernels/native/cpp/step_ops.h. Define which tokens it keeps in runtime/sampling/reference.py.
   kernels/native/cpp/isa/sampling/sampling.h and kernels/triton/sampling/filters.py must keep the same ones.
3. `python scripts/document_tables.py` writes its row in docs/openai.md.

A wire with another name for a parameter renames it in its own struct (frontend/ollama/fields.py). A struct that cannot
inherit from `GivenSampling` is decorated with `with_sampling` (frontend/describe.py).
"""

from collections.abc import Mapping
from math import inf
from typing import NamedTuple


class SamplingParameter(NamedTuple):
    """Describes a sampling parameter: what it does, and which values it may have."""

    help: str  # one sentence
    least: float
    most: float = inf  # inf: no limit, but values must be finite
    whole: bool = False  # values are integers
    zero: str = ""  # what 0 means, if it is a case of its own
    off: float | None = None  # requests may also send values from this one up to `least`, which turn it off
    recommended: bool = False  # a model's generation_config.json or GGUF file may set it

    @property
    def limit(self) -> str:
        """The range in words, such as "from 0 to 1"."""
        if not self.zero:
            return f"from {self.least:g} to {self.most:g}"
        return f"0 ({self.zero}) or more, and " + ("finite" if self.most == inf else f"at most {self.most:.0f}")

    def row(self, name: str) -> str:
        """Its row in docs/openai.md."""
        off = "" if self.off is None else f"; {self.off:g} is off, too"
        return f"| `{name}` | {self.limit}{off} | {self.help} |"

    @property
    def json_schema(self) -> dict[str, str | float]:
        """The keywords of JSON Schema for values in requests."""
        most = {} if self.most == inf else {"maximum": self.most}
        return {"description": self.help, "minimum": self.least if self.off is None else self.off, **most}


SAMPLING: Mapping[str, SamplingParameter] = {
    "temperature": SamplingParameter(
        "0 always takes the most likely token; 1 samples.", 0, zero="greedy", recommended=True
    ),
    "top_p": SamplingParameter(
        "Sample from the most likely tokens that together have this probability.", 0, 1, recommended=True
    ),
    "top_k": SamplingParameter(
        "Sample from this many most likely tokens; 0 is off.",
        *(0, 2**31 - 1),
        whole=True,
        zero="off",
        off=-1,
        recommended=True,
    ),
    "min_p": SamplingParameter(
        "Leave out tokens below this share of the most likely one's probability.", 0, 1, recommended=True
    ),
    "top_n_sigma": SamplingParameter(
        "Leave out tokens that are more than this many standard deviations of the logits below the best; 0 is off.",
        *(0, inf),
        zero="off",
        off=-1,
    ),
    # Beyond this range a float32 logit can overflow. The ranges of the next two are OpenAI's.
    "repetition_penalty": SamplingParameter(
        "Above 1: tokens of the prompt and the answer become less likely.", 0.01, 100, recommended=True
    ),
    "presence_penalty": SamplingParameter("Above 0: tokens of the answer become less likely.", -2, 2),
    "frequency_penalty": SamplingParameter(
        "Above 0: the more often the answer has a token, the less likely it becomes.", -2, 2
    ),
}
