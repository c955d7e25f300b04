"""Writes a checkpoint of random weights; `checkpoint.py FOLDER DEVICE` loads an engine from one."""

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHARD_BYTES = 4 << 30


def roomiest() -> Path:
    """Memory (/dev/shm) or the temporary folder, whichever has more free space."""
    places = [place for place in (Path("/dev/shm"), Path(tempfile.gettempdir())) if place.is_dir()]
    return max(places, key=lambda place: shutil.disk_usage(place).free)


def write_checkpoint(folder: Path, config: Mapping[str, Any], device: Any) -> int:
    """Writes a Hugging Face checkpoint in bf16, drawn on the device. Returns its size in bytes."""
    from make_model import random_tensors
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(dict(config)))
    shard: dict[str, Any] = {}
    index: dict[str, str] = {}
    total = 0

    def write() -> None:
        file = f"model-{len(set(index.values())):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in random_tensors(config, device):
        shard[name] = tensor.cpu()
        total += tensor.nbytes
        if sum(each.nbytes for each in shard.values()) >= SHARD_BYTES:
            write()
    if shard:
        write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return total


def load(folder: str, device: str) -> None:
    """Loads the checkpoint as the engine's worker does."""
    from penstock.config import EngineConfig
    from penstock.runtime.loading.load import load_runner

    config = EngineConfig(
        model=folder,
        name="random",
        dtype="bfloat16",
        device=device,  # type: ignore[arg-type]
        max_model_len=4096,
        depth=2,
    )
    runner = load_runner(config, progress=False)
    print(f"ready: {len(runner.capacity.groups)} KV groups, {runner.capacity.groups[0].num_blocks} blocks")
    runner.close()


if __name__ == "__main__":
    load(*sys.argv[1:])
