"""The ops that a model consists of: each with a torch reference, and with providers that compute it faster somewhere.

The names are those of provider_selection.py. They are looked up on first use: that module imports torch, while weights
are read and packed (native/packer.py, native/reading.py) before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.kernels.provider_selection import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(import_module("penstock.kernels.provider_selection"), name)
