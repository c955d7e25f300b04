"""The writers of matrices in checkpoint folders: which tensors a matrix becomes, and their bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.quantize.formats.grid import CodeFormat, Quantized
from penstock.quantize.formats.integers import Float8, Integers
from penstock.quantize.formats.packing import packed_words
from penstock.quantize.formats.tensor_file import OutputTensor

Arrays = dict[str, NDArray[Any]]
DTYPES = {torch.float32: ("F32", 4), torch.bfloat16: ("BF16", 2), torch.float16: ("F16", 2)}


class CannotQuantizeTo(ValueError):
    """The options do not fit each other or the model; the message names the value, the limit and the remedy."""


def floats(values: Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """Returns the bits of values in a type that NumPy may not have."""
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    array: NDArray[Any] = values.to(dtype).contiguous().view(kind).numpy()
    return array


def unsigned(weight: Quantized) -> NDArray[np.uint8]:
    """Returns the codes of a weight of whole numbers, from 0 on."""
    codes: NDArray[np.uint8] = (weight.codes - weight.grid.low).to(torch.uint8).numpy()
    return codes


def check_group(name: str, columns: int, fmt: CodeFormat) -> None:
    """Raises CannotQuantizeTo unless a row is whole spans of the format."""
    if fmt.span and columns % fmt.span:
        fits = [str(size) for size in (256, 192, 128, 96, 64, 48, 32, 16) if columns % size == 0]
        raise CannotQuantizeTo(
            f"--group {fmt.span} does not divide the {columns} columns of {name}: use --group "
            f"{', '.join([*fits, '0'])} (0: one scale for a row), or --keep it in floats"
        )


@dataclass(frozen=True)
class CompressedTensors:
    """Writes compressed-tensors, which vLLM, SGLang and transformers read: pack-quantized (whole numbers in words),
    int-quantized (a byte each, with scales for rows; activations of tokens become int8) or float-quantized. Names are
    those of weights, and end in `.weight`."""

    fmt: Integers | Float8
    activations: bool = False  # int8 activations with a scale for each token: W8A8

    @property
    def _packed(self) -> bool:
        return isinstance(self.fmt, Integers) and not self.activations

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises CannotQuantizeTo for a matrix [rows, columns] that the format cannot hold."""
        check_group(name, shape[1], self.fmt)

    def entries(self, name: str, shape: tuple[int, ...]) -> dict[str, OutputTensor]:
        """Returns the tensors that replace a matrix in the file."""
        rows, columns = shape
        dtype, size = DTYPES[self.fmt.dtype]
        groups = columns // (self.fmt.span or columns)
        scales = {f"{name}_scale": OutputTensor(dtype, (rows, groups), rows * groups * size)}
        if not self._packed:
            kind = "F8_E4M3" if isinstance(self.fmt, Float8) else "I8"
            return {name: OutputTensor(kind, shape, rows * columns)} | scales
        assert isinstance(self.fmt, Integers)
        words, word_rows = (-(-count * self.fmt.bits // 32) for count in (columns, rows))
        entries = {f"{name}_packed": OutputTensor("I32", (rows, words), 4 * rows * words)} | scales
        if self.fmt.zero_points:
            entries[f"{name}_zero_point"] = OutputTensor("I32", (word_rows, groups), 4 * word_rows * groups)
        return entries | {f"{name}_shape": OutputTensor("I64", (2,), 16)}

    def encode(self, name: str, weight: Quantized) -> Arrays:
        """Returns the bytes of these tensors."""
        grid = weight.grid
        arrays: Arrays = {f"{name}_scale": floats(grid.scale, self.fmt.dtype)}
        if isinstance(self.fmt, Float8):
            arrays[name] = weight.codes.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        elif not self._packed:
            arrays[name] = weight.codes.to(torch.int8).numpy()
        else:
            arrays[f"{name}_packed"] = packed_words(unsigned(weight), self.fmt.bits)
            arrays[f"{name}_shape"] = np.array(weight.codes.shape, np.int64)
            if grid.zero is not None:
                zeros = grid.zero.to(torch.uint8).numpy()
                arrays[f"{name}_zero_point"] = np.ascontiguousarray(packed_words(zeros.T, self.fmt.bits).T)
        return arrays

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Returns the quantization_config. `ignored` are the modules of matrices that stay floats."""
        weights: dict[str, Any] = {"dynamic": False, "symmetric": True, "group_size": None}
        inputs = None
        if isinstance(self.fmt, Float8):
            name = "float-quantized"
            weights |= {"num_bits": 8, "type": "float", "strategy": "channel"}
            inputs = {**weights, "dynamic": True, "strategy": "token"}
        else:
            name = "int-quantized" if self.activations else "pack-quantized"
            strategy = "group" if self.fmt.group else "channel"
            weights |= {"num_bits": self.fmt.bits, "type": "int", "strategy": strategy}
            weights |= {"group_size": self.fmt.group or None, "symmetric": not self.fmt.zero_points}
            if self.activations:
                inputs = {**weights, "dynamic": True, "strategy": "token"}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": name,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignored),
        }


@dataclass(frozen=True)
class GptqCheckpoint:
    """Writes the format of AutoGPTQ and GPTQModel, version 1: codes packed along the inputs, zero points less one."""

    fmt: Integers

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        check_group(name, shape[1], self.fmt)
        if shape[0] % 32 or shape[1] % 32:
            raise CannotQuantizeTo(
                f"--format gptq packs 32 rows and 32 columns, but {name} has {shape[0]} rows and {shape[1]} columns: "
                "use --format compressed-tensors, or --keep it in floats"
            )

    def entries(self, name: str, shape: tuple[int, ...]) -> dict[str, OutputTensor]:
        rows, columns = shape
        groups = columns // (self.fmt.group or columns)
        module, words = name.removesuffix("weight"), columns * self.fmt.bits // 32
        zeros = rows * self.fmt.bits // 32
        return {
            f"{module}qweight": OutputTensor("I32", (words, rows), 4 * words * rows),
            f"{module}qzeros": OutputTensor("I32", (groups, zeros), 4 * groups * zeros),
            f"{module}scales": OutputTensor("F16", (groups, rows), 2 * groups * rows),
            f"{module}g_idx": OutputTensor("I32", (columns,), 4 * columns),
        }

    def encode(self, name: str, weight: Quantized) -> Arrays:
        grid, module = weight.grid, name.removesuffix("weight")
        zero = torch.full_like(grid.scale, -grid.low) if grid.zero is None else grid.zero
        stored = (zero.T - 1) % (1 << self.fmt.bits)  # readers add one, and keep the lowest bits
        return {
            f"{module}qweight": np.ascontiguousarray(packed_words(unsigned(weight), self.fmt.bits).T),
            f"{module}qzeros": packed_words(stored.to(torch.uint8).contiguous().numpy(), self.fmt.bits),
            f"{module}scales": floats(grid.scale.T, torch.float16),
            f"{module}g_idx": (np.arange(weight.codes.shape[1]) // grid.group).astype(np.int32),
        }

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "bits": self.fmt.bits,
            "group_size": self.fmt.group or -1,
            "sym": not self.fmt.zero_points,
            "desc_act": False,
            "lm_head": False,
            "true_sequential": True,
        } | ({"dynamic": {f"-:{name}": {} for name in ignored if name != "lm_head"}} if len(ignored) > 1 else {})


CheckpointTarget = CompressedTensors | GptqCheckpoint
