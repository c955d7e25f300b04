"""What the examples name: a folder with a model for each path, a hub with a model for each id, certificates.

To use a new name in an example, add it here.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from tests.checkpoints import randomise, write_tokenizer
from tests.cli.plan.test_plan import LLAMA_70B
from tests.clients.matrix import CLIENTS
from tests.docs.pages import ROOT
from tests.e2e.certificates import Authority
from tests.gguf_models import write_gguf
from tests.repository import onnx_files
from tests.smollm2 import smollm2
from tests.weights.quantised.writers import KINDS, write_floats, write_pair

CHECKPOINTS = ("MODEL", "MODEL_DIR", "checkpoint", "my-checkpoint")
TEXTS = ("book.txt", "text.txt")
REAL = ("SmolLM2-135M-Instruct.Q4_1.gguf",)
HUB = ("Qwen/Qwen3-0.6B", "org/name", "org/repo", "org/model")  # each in safetensors, and in GGUF as Q4_K_M
HUB_GGUF = ("bartowski/Qwen_Qwen3-0.6B-GGUF",)  # with a GGUF file alone
CHECKOUT = ("LICENSE", "README.md", "benchmarks", "constraints.txt", "hatch_build.py", "packaging", "pyproject.toml")
LLAMA = "llama-cpp-python"

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,  # examples set --max-model-len
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
LEGACY = """#pb
name: "legacy"
backend: "onnxruntime"
max_batch_size: 8
"""
# pip finds what is installed, and whether it fits: nothing is downloaded, installed or compiled.
PIP = """#!/bin/sh
command=$1; shift
export PENSTOCK_NO_KERNELS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
exec {python} -m pip "$command" --no-index --dry-run --no-build-isolation "$@"
"""


class Stock:
    """The files that all pages share, made once. `hub_url` is the address of a hub that has `models_of_hub`."""

    hub_url: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = _checkpoint(folder / "tiny", "Qwen3", head_dim=32)
        self.mixture = _checkpoint(folder / "tiny-mixture", "Mixtral", num_local_experts=8, num_experts_per_tok=2)
        self.gguf = write_gguf(_checkpoint(folder / "tiny-llama", "Llama"), folder / "tiny.Q4_K_M.gguf")
        self.gptq, _ = write_pair(write_floats(folder / "floats"), folder / "gptq", KINDS["gptq"])
        self.text = folder / "text.txt"
        self.text.write_text("The pipe that keeps a turbine under full head is called a penstock.\n" * 1500)
        self.large = folder / "large"
        self.large.mkdir()
        (self.large / "config.json").write_text(json.dumps(LLAMA_70B))
        self.authority = Authority(folder)
        self.certificate, self.key = self.authority.sign(1)
        self.programs = folder / "venv" / "bin"
        self.programs.mkdir(parents=True)
        self._program("penstock", f'#!/bin/sh\nexec {sys.executable} -m penstock "$@"\n')
        self._program("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        self._program("pip", PIP.format(python=sys.executable))
        if llama := python_with(LLAMA):
            self._program("LLAMA", f'#!/bin/sh\nexec {llama} "$@"\n')

    def models_of_hub(self) -> dict[str, dict[str, bytes]]:
        """The files of each model."""
        dense, quantized = {path.name: path.read_bytes() for path in self.checkpoint.iterdir()}, self.gguf.read_bytes()
        both = {name: {**dense, f"{name.rpartition('/')[2]}.Q4_K_M.gguf": quantized} for name in HUB}
        alone = {name: {f"{name.rpartition('/')[2].removesuffix('-GGUF')}-Q4_K_M.gguf": quantized} for name in HUB_GGUF}
        return both | alone

    def lay_out(self, folder: Path) -> Path:
        """Puts everything that examples name into a new folder: a checkout with more in it, and a home."""
        folder.mkdir()
        links = {
            **dict.fromkeys(CHECKPOINTS, self.checkpoint),
            **dict.fromkeys(TEXTS, self.text),
            **dict.fromkeys(REAL, smollm2()),
            **{name: ROOT / name for name in (*CHECKOUT, "scripts", "src")},
            ".venv": self.programs.parent,
            "mixture": self.mixture,
            "llama-70b": self.large,
            "model.Q4_K_M.gguf": self.gguf,
            "model-GPTQ": self.gptq,
        }
        for name, target in links.items():
            (folder / name).symlink_to(target)
        (folder / "docs").mkdir()  # one of its own: an example writes into it
        _repository(folder / "models")
        (folder / "notes.txt").write_text("Rivers carry water from the mountains to the sea.\n")
        labels = [{"request": {"prompt": f"of {n}"}, "small": n % 2, "large": 1, "logprob": -n / 9} for n in range(40)]
        for name in ("labels.jsonl", "other_labels.jsonl"):
            (folder / name).write_text("\n".join(map(json.dumps, labels)))
        (folder / "fullchain.pem").write_bytes(self.certificate)
        (folder / "privkey.pem").write_bytes(self.key)
        return folder

    def environment(self, home: Path) -> dict[str, str]:
        """The environment of the examples: Penstock of this tree, a hub on loopback and an empty cache, one thread."""
        others = ("PENSTOCK_", "HF_", "XDG_", "PIP_")
        own = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        own = {name: value for name, value in own.items() if not name.lower().endswith("_proxy")}
        return {
            **own,
            "PATH": f"{self.programs}:{own.get('PATH', os.defpath)}",
            "PYTHONPATH": str(ROOT / "src"),
            "HOME": str(home),
            "HF_ENDPOINT": self.hub_url,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "SSL_CERT_FILE": str(self.authority.file),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "160",
        }

    def _program(self, name: str, text: str) -> None:
        program = self.programs / name
        program.write_text(text)
        program.chmod(0o755)


def python_with(package: str) -> Path | None:
    """The Python of an environment that has a package: of those that TEST_CLIENTS names (tests/clients/matrix.py), or
    the one that LLAMA names."""
    if package == LLAMA:
        return Path(os.environ["LLAMA"]) if "LLAMA" in os.environ else None
    clients = [client for client in CLIENTS if client.package == package and not client.node]
    assert clients, f"matrix.py has no {package}"
    return next((client.runtime() for client in clients if client.is_installed()), None)


def _checkpoint(folder: Path, family: str, **changes: object) -> Path:
    """Writes a small random model that four ranks can share, with as many token ids as `penstock bench serve` sends."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    randomise(model, 0, norm_mean=1.0)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def _repository(folder: Path) -> None:
    """Writes the repository of docs/repository.md, with the pipeline of docs/pipelines.md."""
    for version in (1, 2):
        onnx_files.put(folder, "ranker", onnx_files.scale(version), version)
    onnx_files.put(folder, "legacy", onnx_files.scale(1), settings=LEGACY)
    for name, model in (("minilm", "all-minilm-l6-v2"), ("chat", "smollm2-135m")):
        (folder / name).mkdir()
        (folder / name / "model.yaml").write_text(f"model: {model}\n")
    weight = onnx_files.weight("w", np.ones((384, 3), np.float32))
    shapes = (("x", onnx_files.FLOAT, ("n", 384)), ("y", onnx_files.FLOAT, ("n", 3)))
    product = onnx_files.node("MatMul", ["x", "w"], ["y"])
    onnx_files.put(folder, "classifier", onnx_files.model([product], shapes[:1], shapes[1:], [weight]))
    (folder / "answers").mkdir()
    page = (ROOT / "docs/pipelines.md").read_text()
    (folder / "answers" / "model.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
