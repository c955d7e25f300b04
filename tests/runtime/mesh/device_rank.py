"""Runs one rank of a CUDA engine on the CPU, in place of penstock.engine.ranks.worker:
python -m tests.runtime.mesh.device_rank ..."""

import sys

import torch

from penstock.config import RankPlace
from penstock.engine.ranks.wire import Start
from penstock.engine.ranks.worker import work
from penstock.runtime.runner import ModelRunner
from tests.runtime.loading.test_load_device import MIB, Memory
from tests.runtime.mirror_device import load_mirror


def load(start: Start) -> ModelRunner:
    """Loads a rank. The higher its number, the less memory it has for the KV cache."""
    if start.num_blocks:
        raise RuntimeError("the engine cannot know how much room there is on a GPU")
    torch.set_num_threads(1)
    place = RankPlace(start.config.split, start.rank)
    memory = Memory(steps=(64 + 2048 * place.rank) * MIB)
    return load_mirror(start.config, memory, place, start.rendezvous, progress=False)


if __name__ == "__main__":
    sys.exit(work(load))
