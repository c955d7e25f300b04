"""What the examples name: a folder with a model for each path, a cache with each model of the hub.

To use a new name in an example, add it here.
"""

import json
import os
import sys
from hashlib import sha1
from pathlib import Path

from tests.checkpoints import randomise, write_tiny_checkpoint, write_tokenizer
from tests.cli.plan.test_plan import LLAMA_70B
from tests.docs.pages import ROOT
from tests.gguf_models import write_gguf
from tests.smollm2 import smollm2

CHECKPOINTS = ("MODEL", "MODEL_DIR", "checkpoint", "my-checkpoint")
TEXTS = ("book.txt", "text.txt")
REAL = ("SmolLM2-135M-Instruct.Q4_1.gguf",)
HUB = ("Qwen/Qwen3-0.6B", "org/name", "org/repo", "org/model")  # each in safetensors, and in GGUF as Q4_K_M
FROM_REPOSITORY = ("benchmarks", "scripts")

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


class Stock:
    """The files that all pages share, made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = _checkpoint(folder / "tiny", "Qwen3", head_dim=32)
        self.mixture = _checkpoint(folder / "tiny-mixture", "Mixtral", num_local_experts=8, num_experts_per_tok=2)
        self.gguf = write_gguf(write_tiny_checkpoint("llama2", folder / "tiny-llama"), folder / "tiny.Q4_K_M.gguf")
        self.text = folder / "text.txt"
        self.text.write_text("The pipe that keeps a turbine under full head is called a penstock.\n" * 1500)
        self.large = folder / "large"
        self.large.mkdir()
        (self.large / "config.json").write_text(json.dumps(LLAMA_70B))
        self.hub = folder / "hub"
        for name in HUB:
            _cache(self.hub, name, self.checkpoint, self.gguf)
        self.programs = folder / "venv" / "bin"
        self.programs.mkdir(parents=True)
        for name, words in (("penstock", f"{sys.executable} -m penstock"), ("python", sys.executable)):
            program = self.programs / name
            program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            program.chmod(0o755)

    def lay_out(self, folder: Path) -> Path:
        """Puts everything that examples name into a new folder."""
        folder.mkdir()
        links = {
            **dict.fromkeys(CHECKPOINTS, self.checkpoint),
            **dict.fromkeys(TEXTS, self.text),
            **dict.fromkeys(REAL, smollm2()),
            **{name: ROOT / name for name in FROM_REPOSITORY},
            ".venv": self.programs.parent,
            "mixture": self.mixture,
            "llama-70b": self.large,
            "model.Q4_K_M.gguf": self.gguf,
        }
        for name, target in links.items():
            (folder / name).symlink_to(target)
        (folder / "notes.txt").write_text("Rivers carry water from the mountains to the sea.\n")
        return folder

    def environment(self) -> dict[str, str]:
        """The environment of the examples: Penstock of this tree, the cache instead of the hub, one thread."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "HF_"))}
        return {
            **own,
            "PATH": f"{self.programs}:{own.get('PATH', os.defpath)}",
            "PYTHONPATH": str(ROOT / "src"),
            "HF_HOME": str(self.folder / "huggingface"),
            "HF_HUB_CACHE": str(self.hub),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "160",
        }


def _checkpoint(folder: Path, family: str, **changes: object) -> Path:
    """Writes a small random model that four ranks can share, with as many token ids as `penstock bench serve` sends."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    randomise(model, 0, norm_mean=1.0)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def _cache(hub: Path, name: str, checkpoint: Path, gguf: Path) -> None:
    """A model in the layout of huggingface_hub's cache."""
    folder = hub / f"models--{name.replace('/', '--')}"
    commit = sha1(name.encode()).hexdigest()
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    for file in checkpoint.iterdir():
        (snapshot / file.name).symlink_to(file)
    (snapshot / f"{name.rpartition('/')[2]}.Q4_K_M.gguf").symlink_to(gguf)
