"""Checkpoints whose matrices are FP8 (E4M3), with scales in tensors of their own: a value is a code times its scale."""

from collections.abc import Mapping
from dataclasses import replace

from penstock.families.checkpoint.stored import CheckpointError, Scales, StoredTensor
from penstock.families.hf_config import HFConfig

FP8 = "F8_E4M3"
SCALE_TYPES = ("F32", "BF16", "F16")
Block = tuple[int, int]  # rows and columns that share a scale

_SCALES = ("_scale_inv", "_scale")  # what follows the weight's name
_OF_ACTIVATIONS = (".input_scale", ".activation_scale")  # what follows the layer's; x is not quantised here
_SUPPORTED = "fp8, compressed-tensors with float weights of 8 bits, or weights in float32, bfloat16 or float16"


def scale_block(config: HFConfig, quantization: HFConfig) -> Block:
    """The rows and columns that share a scale, by the quantization_config of FP8; (0, 0): each row or tensor has one.
    Raises UnsupportedModel for other kinds of quantisation."""
    method = quantization.get("quant_method")
    if method == "fp8" and quantization.get("fmt") in (None, "e4m3"):
        return _block(quantization, "weight_block_size")
    groups = quantization.section("config_groups") if method == "compressed-tensors" else None
    weights = [groups.section(name) for name in groups.names()] if groups else []
    weights = [group and group.section("weights") for group in weights]
    blocks = {_block(each, "block_structure") for each in weights if each and _is_fp8(each)}
    if not weights or len(blocks) != 1 or not all(each and _is_fp8(each) for each in weights):
        raise config.unsupported("quantization_config", method, _SUPPORTED)
    return blocks.pop()


def with_scales(tensors: Mapping[str, StoredTensor], block: Block | None) -> dict[str, StoredTensor]:
    """The tensors, those of FP8 with their scales, which are no tensors of the model. Nothing changes without a
    `block`. Raises CheckpointError for a matrix without scales, and for scales of another shape."""
    found = dict(tensors)
    if block is None:
        return found
    for name, tensor in tensors.items():
        if tensor.dtype != FP8:
            continue
        scales = next((found.pop(name + end) for end in _SCALES if name + end in found), None)
        if scales is None:
            raise CheckpointError(f"{tensor.path}: {name!r} is FP8, but there is no {name + _SCALES[0]!r}, its scales")
        found[name] = replace(tensor, scales=_scales(tensor, scales, block))
        for end in _OF_ACTIVATIONS:
            found.pop(name.removesuffix(".weight") + end, None)
    return found


def _is_fp8(weights: HFConfig) -> bool:
    return bool(weights.get("type") == "float" and weights.get("num_bits") == 8)


def _block(fields: HFConfig, name: str) -> Block:
    if fields.get(name) is None:
        return 0, 0
    sizes = fields.integers(name)
    if len(sizes) != 2 or min(sizes) < 1:
        raise fields.unsupported(name, sizes, "rows and columns, such as [128, 128]")
    return sizes[0], sizes[1]


def _scales(tensor: StoredTensor, scales: StoredTensor, block: Block) -> Scales:
    """Raises CheckpointError unless there is a scale for each block, for each row, or one for all."""
    rows, columns = (*tensor.shape, 1)[:2]
    if scales.shape in ((), (1,), (1, 1)):
        block = rows, columns
    elif scales.shape in ((rows,), (rows, 1)) and not block[0]:
        block = 1, columns
    expected = (-(-rows // block[0]), -(-columns // block[1])) if block[0] else (rows, 1)
    count = expected[0] * expected[1]
    fits = len(tensor.shape) == 2 and scales.dtype in SCALE_TYPES
    if not fits or scales.size != count * 4 // (1 if scales.dtype == "F32" else 2):
        raise CheckpointError(
            f"{scales.path}: {scales.name!r}, {scales.dtype} {list(scales.shape)}, are no scales of {tensor.name!r} "
            f"{list(tensor.shape)}; expected {list(expected)} in {', '.join(SCALE_TYPES)}"
        )
    return Scales(scales, *block)
