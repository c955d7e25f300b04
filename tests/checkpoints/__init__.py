"""Tiny random checkpoints of every family, written by transformers.

Weights are drawn so that logits are well spread: greedy tokens do not hang on the last bit, and norms, biases and
scales matter.
"""

from tests.checkpoints.sizes import END, END_TURN, SIZES
from tests.checkpoints.variants import DIVISIBLE, ON_GPUS, STATES, TYPICAL, VARIANTS, WITH_OFFSET
from tests.checkpoints.write import randomise, split_checkpoint, tiny_model, write_tiny_checkpoint, write_tokenizer

__all__ = [
    "DIVISIBLE",
    "END",
    "END_TURN",
    "ON_GPUS",
    "SIZES",
    "STATES",
    "TYPICAL",
    "VARIANTS",
    "WITH_OFFSET",
    "randomise",
    "split_checkpoint",
    "tiny_model",
    "write_tiny_checkpoint",
    "write_tokenizer",
]
