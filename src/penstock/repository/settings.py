"""The settings of a model in a repository, as model.yaml has them.

`penstock.repository.triton` makes the same settings from Triton's config.pbtxt.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.config.yaml_file import parse_yaml
from penstock.messages.tensors import DATATYPES
from penstock.schedule.batcher import BatchRules
from penstock.schedule.resources import ResourceNeeds

MAX_BYTES = 256 << 10  # of the file
MAX_ROWS = 1 << 20  # of a batch
MAX_WAIT = 3600.0  # seconds
MAX_INSTANCES = 64
MAX_THREADS = 256
MAX_LEVELS = 32
MAX_PRIORITY = 1 << 16
MAX_UNITS = 1 << 30  # of a resource
WEIGHTS = (0.01, 100.0)  # of a language model
DEFAULT_ROWS = 32  # of a batch, where the model has a batch dimension and the settings do not say
HANG_SECONDS = 120.0
Kind = Literal["onnx", "torch", "llm", "pipeline"]
FILES: dict[Kind, str] = {"onnx": "model.onnx", "torch": "model.pt2"}  # the usual name of a version's file, by kind
# How a PyTorch model comes into a file that needs no code to be read.
EXPORT = (
    "export it where its Python code is: torch.export.save(torch.export.export(model.eval(), (sample,)), 'model.pt2')"
)


class SettingsError(ValueError):
    """The settings of a model are wrong. The message names the field, the value and what is possible."""


class TensorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """An input or output, without the batch dimension. -1 means any size."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False
    reshape: tuple[int, ...] | None = None  # the shape that the model has, where it differs from that of requests
    labels: str = ""  # of an output: the file with the names of classes, one a line

    def __post_init__(self) -> None:
        if self.datatype not in DATATYPES:
            raise ValueError(f"{self.name!r} has datatype {self.datatype!r}; it must be one of {', '.join(DATATYPES)}")


class PipelineStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """A step of a pipeline. One of the first six fields says what it does. In `inputs` and `outputs`, names of the
    model's tensors come first, then those of the pipeline."""

    model: str = ""
    tokenize: str = ""  # a language model, with whose tokenizer texts become token ids
    detokenize: str = ""
    switch: str = ""  # an expression: rows for which it is true go to `then`, the others to `else`
    split: str = ""  # a tensor, which is divided `into` others along its last dimension
    merge: str = ""  # a tensor that is made `of` others, which are joined along their last dimension
    version: str = ""
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}
    then: tuple["PipelineStep", ...] = ()
    otherwise: tuple["PipelineStep", ...] = msgspec.field(name="else", default=())
    into: dict[str, int] = {}  # sizes, by tensor
    of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for a step that does nothing, or two things."""
        found = [kind for kind in _STEP_FIELDS if getattr(self, kind)]
        if len(found) != 1:
            raise ValueError(
                f"a step has {' and '.join(found) or 'no kind'}; it must have one of {', '.join(_STEP_FIELDS)}"
            )
        used = {each for each in self.__struct_fields__ if getattr(self, each)} - set(found)
        if extra := used - set(_STEP_FIELDS[found[0]]):
            raise ValueError(f"a step with {found[0]} has {min(extra)}, which has no effect there; leave it out")

    @property
    def kind(self) -> str:
        """Which of the first six fields it has."""
        return next(kind for kind in _STEP_FIELDS if getattr(self, kind))

    @property
    def name(self) -> str:
        """The model that it uses; "" if it uses none."""
        return self.model or self.tokenize or self.detokenize


_OF_MODEL = ("inputs", "outputs")
_STEP_FIELDS = {  # the fields that a step of each kind may have
    "model": ("version", *_OF_MODEL),
    "tokenize": _OF_MODEL,
    "detokenize": _OF_MODEL,
    "switch": ("then", "otherwise"),
    "split": ("into",),
    "merge": ("of",),
}


def members(steps: Sequence[PipelineStep]) -> set[str]:
    """Returns the names of the models that steps use."""
    return {step.name for step in _all_steps(steps)} - {""}


def _all_steps(steps: Sequence[PipelineStep]) -> Iterator[PipelineStep]:
    for step in steps:
        yield step
        yield from _all_steps((*step.then, *step.otherwise))


class Latest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The policy that loads the newest versions."""

    latest: int


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """The settings of a model. None means that the model's files decide."""

    kind: Kind | None = None
    versions: Literal["latest", "all"] | Latest | tuple[int, ...] = "latest"
    labels: dict[str, int] = {}  # names of versions in requests
    file: str = ""  # within a version's folder; "": the kind's usual name
    max_batch_size: int | None = None  # 0: inputs have no batch dimension
    inputs: tuple[TensorSettings, ...] = ()
    outputs: tuple[TensorSettings, ...] = ()
    instances: int = 1
    threads: int = 1  # that compute one batch
    batching: BatchRules = BatchRules()
    rate_limiter: ResourceNeeds = ResourceNeeds()  # of a batch
    cache: bool = False  # keep answers, and give them to equal requests
    hang_timeout: float = HANG_SECONDS  # for one run
    steps: tuple[PipelineStep, ...] = ()  # of a pipeline
    model: str = ""  # of an LLM: what `penstock serve` would be given; "": the version's folder
    keep_alive: float | None = None  # of an LLM: seconds without a request after which it sleeps; None: --sleep-after
    weight: float = 1.0  # of an LLM: its share of the processors, in proportion to that of others that compete
    judge: tuple[str, ...] = ()  # of rollouts: a command that scores pairs of answers
    settings: dict[str, Any] = {}  # of an LLM: those of `penstock serve`, by name
    triton: dict[str, Any] = {}  # what config.pbtxt says besides, for clients that read it

    def __post_init__(self) -> None:
        """Raises ValueError for values that cannot be."""
        _check("keep-alive", self.keep_alive or 0, 0, MAX_WAIT * 24)
        _check("weight", self.weight, *WEIGHTS)
        _check("instances", self.instances, 1, MAX_INSTANCES)
        _check("threads", self.threads, 1, MAX_THREADS)
        _check("max-batch-size", self.max_batch_size or 0, 0, MAX_ROWS)
        _check("batching.max-wait", self.batching.max_wait, 0, MAX_WAIT)
        _check("hang-timeout", self.hang_timeout, 0.001, MAX_WAIT)
        _check("batching.levels", len(self.batching.levels), 1, MAX_LEVELS)
        _check("batching.default-level", self.batching.default_level, 1, len(self.batching.levels))
        if (self.batching.max_rows, self.batching.instances, self.batching.starts_after) != (1, 1, 0):
            raise ValueError("batching has no max-rows, instances or starts-after: set max-batch-size and instances")
        _check("rate-limiter.priority", self.rate_limiter.priority, 1, MAX_PRIORITY)
        for name, units in self.rate_limiter.resources.items():
            _check(f"rate-limiter.resources.{name[:60]}", units, 1, MAX_UNITS)
        for rows in self.batching.preferred:
            _check("batching.preferred", rows, 1, self.max_batch_size or MAX_ROWS)
        if self.batching.mode == "static" and not self.batching.max_wait:
            raise ValueError("batching.mode is static, but batching.max-wait is 0: set the longest wait in seconds")
        if self.file != Path(self.file).name or self.file in (".", ".."):
            raise ValueError(f"file is {self.file[:100]!r}; it must be the name of a file in the version's folder")
        if isinstance(self.versions, Latest):
            _check("versions.latest", self.versions.latest, 1, MAX_ROWS)


def chosen_versions(settings: ModelSettings, there: list[int]) -> list[int]:
    """Returns the versions that the policy loads, of those in the folder, the oldest first."""
    policy, numbers = settings.versions, sorted(there)
    if policy == "all":
        return numbers
    if isinstance(policy, tuple):
        return sorted(set(policy) & set(numbers))
    return numbers[-(policy.latest if isinstance(policy, Latest) else 1) :]


def read_yaml(text: str) -> ModelSettings:
    """Returns the settings in the text of a model.yaml. Raises SettingsError."""
    try:
        fields = parse_yaml(text, "model.yaml")
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return of_fields({} if fields is None else fields)


def of_fields(fields: Mapping[str, Any]) -> ModelSettings:
    """Returns settings from their fields in model.yaml. Raises SettingsError."""
    try:
        return msgspec.convert(fields, ModelSettings)
    except (msgspec.ValidationError, RecursionError) as error:
        raise SettingsError(str(error).replace("`", "").replace("$.", "")) from None


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} is {value:g}; it must be from {least:g} to {most:g}")
