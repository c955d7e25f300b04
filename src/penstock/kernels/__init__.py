"""Ops: what a model computes, with a torch reference each, and the providers that compute it on a given machine.

The names are those of selection.py, which imports torch: so they are looked up when somebody asks for them. What reads
and packs weights (native/packer.py, native/reading.py) can be imported without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.kernels.selection import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(import_module("penstock.kernels.selection"), name)
