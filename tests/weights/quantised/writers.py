"""Writes quantised checkpoints in the layouts of the tools, code by code. A writer turns a matrix [n, k] into the
tensors that a file has for it, and its values in fp32, both by plain arithmetic that shares nothing with the readers.
So tests have layouts and sizes of every kind. Files that the tools themselves wrote are in `written` (test_tools.py).
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints.sizes import SIZES
from tests.checkpoints.write import randomise, write_tokenizer

Tensors = dict[str, Tensor]
Writer = Callable[[str, Tensor], tuple[Tensors, Tensor]]  # (module, weight) to (tensors by name, values)
COMMON = {**SIZES, "hidden_size": 96, "head_dim": 48, "num_hidden_layers": 2, "tie_word_embeddings": False}
COMMON["max_position_embeddings"] = 1024
PLAIN = ("norm", "embed", "lm_head", "mlp.gate.", ".bias")  # what stays in floats
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Grid:
    """Codes [n, k] rounded to the nearest, with scales and zero points [n, groups], and the group of each column."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor

    @property
    def values(self) -> Tensor:
        return (self.codes - self.zeros[:, self.order]).float() * self.scales.float()[:, self.order]


def grid(
    weight: Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype, order: Tensor | None = None
) -> Grid:
    """Quantises by groups of columns: 0 for one, and with `order` those that it names."""
    k = weight.shape[1]
    if order is None:
        order = torch.arange(k) // group if group else torch.zeros(k, dtype=torch.long)
    most, parts = (1 << bits) - 1, [weight[:, order == i].float() for i in range(int(order.max()) + 1)]
    low, high = (torch.stack([getattr(part, end)(1) for part in parts], 1) for end in ("amin", "amax"))
    if symmetric:
        scales = torch.maximum(-low, high) * 2 / most
    else:
        low, high = low.clamp_max(0), high.clamp_min(0)
        scales = (high - low) / most
    scales = scales.to(dtype)
    zeros = torch.full_like(scales, (most + 1) // 2) if symmetric else (-low / scales.float()).round().clamp(0, most)
    zeros = zeros.long()
    codes = ((weight.float() / scales.float()[:, order]).round() + zeros[:, order]).clamp(0, most).long()
    return Grid(codes, scales, zeros, order)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes [count, m] in words int32 along dimension 0, the lowest bits first, as AutoGPTQ packs them."""
    words = np.zeros((-(-len(codes) * bits // 32) + 1, codes.shape[1]), np.uint64)
    for i, row in enumerate(codes.numpy().astype(np.uint64)):
        word, bit = divmod(i * bits, 32)
        wide = row << np.uint64(bit)
        words[word] |= wide & np.uint64(0xFFFFFFFF)
        words[word + 1] |= wide >> np.uint64(32)
    return torch.from_numpy(words[:-1].astype(np.uint32).view(np.int32).copy())


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    version: int = 1,
    by_gptqmodel: bool = True,
    scattered: bool = False,
    dtype: torch.dtype = torch.float16,
    wrong_version: bool = False,
) -> Writer:
    """GPTQ. Zero points of version 1 are written less one, as GPTQModel subtracts or, for 3 bits, as AutoGPTQ does."""
    ones = {2: [0x55555555], 3: [0x24924924, 0x92492492, 0x49249249], 4: [0x11111111], 8: [0x01010101]}[bits]

    def write(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        k = weight.shape[1]
        order = torch.arange(k) // (group or k)
        if scattered:
            order = order[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        found = grid(weight, bits, group, symmetric=symmetric, dtype=dtype, order=order)
        zeros = packed(found.zeros, bits).T.contiguous()
        if (version == 1) != wrong_version:
            if bits == 3 and not by_gptqmodel:
                zeros = packed(found.zeros - 1 & 7, bits).T.contiguous()
            else:
                less = torch.tensor(ones).repeat(-(-zeros.shape[1] // len(ones)))[: zeros.shape[1]]
                zeros = (zeros.long() - less & 0xFFFFFFFF).numpy().astype(np.uint32).view(np.int32)
                zeros = torch.from_numpy(zeros.copy())
        return {
            f"{module}.qweight": packed(found.codes.T, bits),
            f"{module}.qzeros": zeros,
            f"{module}.scales": found.scales.T.contiguous(),
            f"{module}.g_idx": order.int(),
        }, found.values

    return write


def awq(group: int = 32, dtype: torch.dtype = torch.float16) -> Writer:
    """AutoAWQ's GEMM order: `order_map` of its WQLinear_GEMM."""

    def words(codes: Tensor) -> Tensor:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        out = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
        for column in range(codes.shape[1] // 8):
            for i in range(8):
                out[:, column] |= codes[:, column * 8 + order[i]].numpy().astype(np.uint32) << np.uint32(4 * i)
        return torch.from_numpy(out.view(np.int32).copy())

    def write(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        found = grid(weight, 4, group, symmetric=False, dtype=dtype)
        return {
            f"{module}.qweight": words(found.codes.T),
            f"{module}.qzeros": words(found.zeros.T),
            f"{module}.scales": found.scales.T.contiguous(),
        }, found.values

    return write


def integers(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    pack: bool = True,
    scattered: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Writer:
    """compressed-tensors' pack-quantized, and int-quantized."""

    def write(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        k = weight.shape[1]
        order = torch.arange(k) // (group or k)
        if scattered:
            order = order[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        found = grid(weight, bits, group, symmetric=symmetric, dtype=dtype, order=order)
        half = 1 << bits - 1
        tensors = {f"{module}.weight_scale": found.scales}
        if pack:
            tensors[f"{module}.weight_packed"] = packed(found.codes.T, bits).T.contiguous()
            tensors[f"{module}.weight_shape"] = torch.tensor(weight.shape)
        else:
            tensors[f"{module}.weight"] = (found.codes - half).to(torch.int8)
        if not symmetric:
            zeros = packed(found.zeros, bits) if pack else (found.zeros - half).to(torch.int8)
            tensors[f"{module}.weight_zero_point"] = zeros
        if scattered:
            tensors[f"{module}.weight_g_idx"] = order.int()
        return tensors, found.values

    return write


def fp4(kind: str) -> Writer:
    """NVFP4 of compressed-tensors and of ModelOpt, and compressed-tensors' MXFP4."""
    group = 32 if kind == "mxfp4" else 16

    def write(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        n, k = weight.shape
        groups = weight.float().view(n, -1, group)
        largest = groups.abs().amax(-1)
        if kind == "mxfp4":
            exponents = (torch.log2(largest.clamp_min(1e-30)).floor() - 2 + 127).clamp(0, 254)
            scales, extra = torch.exp2(exponents - 127), {"weight_scale": exponents.to(torch.uint8)}
        else:
            whole = 448 * 6 / largest.amax()
            stored = (largest / 6 * whole).to(torch.float8_e4m3fn)
            if kind == "nvfp4":
                scales, extra = stored.float() / whole, {"weight_scale": stored, "weight_global_scale": whole[None]}
            else:
                scales = stored.float() * (1 / whole)
                extra = {"weight_scale": stored, "weight_scale_2": 1 / whole}
        grid = torch.tensor(E2M1)
        ratio = groups / scales[..., None]
        codes = (ratio.abs()[..., None] - grid).abs().argmin(-1)
        values = (grid[codes] * ratio.sign() * scales[..., None]).view(n, k)
        codes = (codes + 8 * (ratio < 0)).view(n, k)
        words = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        named = {f"{module}.{end}": tensor for end, tensor in extra.items()}
        return {f"{module}.weight{'' if kind == 'modelopt' else '_packed'}": words, **named}, values

    return write


def bnb4(kind: str, *, nested: bool, block: int = 64) -> Writer:
    """bitsandbytes' NF4 and FP4, with double quantisation or without."""
    outer = 256

    def write(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        table = torch.tensor(NF4 if kind == "nf4" else FP4)
        flat = weight.float().reshape(-1)
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
        absmax = blocks.abs().amax(1)
        name, state = f"{module}.weight", {"quant_type": kind, "blocksize": block, "shape": list(weight.shape)}
        tensors = {f"{name}.absmax": absmax, f"{name}.quant_map": table}
        if nested:
            values = torch.linspace(-1, 1, 256)  # the tool's table has another spacing; files have it in them
            offset = absmax.mean()
            padded = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % outer)).view(-1, outer)
            largest = padded.abs().amax(1)
            places = ((padded / largest[:, None])[..., None] - values).abs().argmin(-1)
            absmax = (values[places] * largest[:, None]).view(-1)[: len(absmax)] + offset
            state |= {"nested_blocksize": outer, "nested_offset": offset.item(), "nested_dtype": "float32"}
            tensors |= {
                f"{name}.absmax": places.view(-1)[: len(absmax)].to(torch.uint8),
                f"{name}.nested_absmax": largest,
                f"{name}.nested_quant_map": values,
            }
        codes = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1)
        values = (table[codes] * absmax[:, None]).view(-1)[: len(flat)].view(weight.shape)
        codes = codes.view(-1)[: len(flat)]
        tensors[name] = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
        text = json.dumps(state).encode()
        tensors[f"{name}.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        return tensors, values

    return write


def bnb8(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """bitsandbytes' int8."""
    largest = weight.float().abs().amax(1)
    codes = (weight.float() * (127 / largest)[:, None]).round().to(torch.int8)
    values = codes.float() * (largest * np.float32(1 / 127))[:, None]
    scalar = torch.tensor(0, dtype=torch.uint8)
    return {f"{module}.weight": codes, f"{module}.SCB": largest, f"{module}.weight_format": scalar}, values


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint: its writer, its quantization_config, and how many matrices of a layer are kept as codes."""

    write: Writer
    config: Mapping[str, Any] = field(hash=False)
    coded: int = 4  # qkv, output, gate and up, down
    dtype: str = "float16"


def gptq_config(bits: int, group: int, **fields: Any) -> dict[str, Any]:
    meta = {"quantizer": ["gptqmodel:5.0.0"]}
    common = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": True, "desc_act": False}
    return {**common, "checkpoint_format": "gptq", "meta": meta, **fields}


def compressed_config(bits: int, group: int, *, kind: str = "int", form: str = "pack-quantized", **fields: Any) -> Any:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    weights = {"num_bits": bits, "type": kind, "symmetric": True, **strategy, **fields}
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group_0},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
    }


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
KINDS: dict[str, Kind] = {
    "gptq": Kind(gptq(), gptq_config(4, 32)),
    "gptq zero points": Kind(gptq(symmetric=False), gptq_config(4, 32, sym=False)),
    "gptq v2": Kind(gptq(symmetric=False, version=2), gptq_config(4, 32, sym=False, checkpoint_format="gptq_v2")),
    "gptq that lies": Kind(gptq(wrong_version=True), gptq_config(4, 32)),
    "gptq v2 that lies": Kind(gptq(version=2, wrong_version=True), gptq_config(4, 32, checkpoint_format="gptq_v2")),
    "gptq by row": Kind(gptq(group=0), gptq_config(4, 0)),
    "gptq 8 bits": Kind(gptq(8, 64), gptq_config(8, 64)),
    "gptq 8 bits zero points": Kind(gptq(8, 64, symmetric=False), gptq_config(8, 64, sym=False)),
    "gptq 3 bits": Kind(gptq(3), gptq_config(3, 32)),
    "gptq 3 bits zero points": Kind(gptq(3, symmetric=False), gptq_config(3, 32, sym=False)),
    "autogptq 3 bits": Kind(gptq(3, symmetric=False, by_gptqmodel=False), gptq_config(3, 32, sym=False, meta=None)),
    "autogptq 3 bits symmetric": Kind(gptq(3, by_gptqmodel=False), gptq_config(3, 32, meta=None)),
    "gptq 2 bits": Kind(gptq(2), gptq_config(2, 32)),
    "gptq 2 bits zero points": Kind(gptq(2, symmetric=False), gptq_config(2, 32, sym=False)),
    "gptq act-order": Kind(gptq(scattered=True), gptq_config(4, 32, desc_act=True)),
    "gptq bfloat16": Kind(gptq(symmetric=False, dtype=torch.bfloat16), gptq_config(4, 32, sym=False), dtype="bfloat16"),
    "awq": Kind(awq(), AWQ_CONFIG),
    "awq by row": Kind(awq(0), AWQ_CONFIG | {"group_size": -1}),
    "w4a16": Kind(integers(), compressed_config(4, 32), dtype="bfloat16"),
    "w4a16 zero points": Kind(integers(symmetric=False), compressed_config(4, 32, symmetric=False), dtype="bfloat16"),
    "w3a16": Kind(integers(3), compressed_config(3, 32), dtype="bfloat16"),
    "w3a16 zero points": Kind(
        integers(3, symmetric=False), compressed_config(3, 32, symmetric=False), dtype="bfloat16"
    ),
    "auto-round": Kind(gptq(), AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}),
    "auto-round awq": Kind(awq(), AUTO_ROUND | {"sym": False, "packing_format": "auto_round:auto_awq"}),
    "auto-round v2": Kind(
        gptq(symmetric=False, version=2), AUTO_ROUND | {"sym": False, "packing_format": "auto_round"}
    ),
    "w4a16 by row": Kind(integers(group=0), compressed_config(4, 0), dtype="bfloat16"),
    "w4a16 actorder": Kind(integers(scattered=True), compressed_config(4, 32, actorder="group"), dtype="bfloat16"),
    "w8a16": Kind(integers(8, 64), compressed_config(8, 64), dtype="bfloat16"),
    "w8a8": Kind(integers(8, 0, pack=False), compressed_config(8, 0, form="int-quantized"), dtype="bfloat16"),
    "w8a8 zero points": Kind(
        integers(8, 0, pack=False, symmetric=False),
        compressed_config(8, 0, form="int-quantized", symmetric=False),
        dtype="bfloat16",
    ),
    "nvfp4": Kind(fp4("nvfp4"), compressed_config(4, 16, kind="float", form="nvfp4-pack-quantized")),
    "mxfp4": Kind(fp4("mxfp4"), compressed_config(4, 32, kind="float", form="mxfp4-pack-quantized")),
    "modelopt nvfp4": Kind(
        fp4("modelopt"), {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*.gate"]}
    ),
    # Rows of 96 columns are no whole blocks of 64, so that only output and down are kept as codes.
    "nf4": Kind(bnb4("nf4", nested=True), BNB4 | {"bnb_4bit_quant_type": "nf4"}, coded=2),
    "fp4": Kind(bnb4("fp4", nested=False), BNB4, coded=2),
    "bitsandbytes int8": Kind(bnb8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


def write_floats(folder: Path, *, moe: bool = False, intermediate: int = 192, **sizes: Any) -> Path:
    """A small Qwen 3 in fp32, with an MLP of this width or with experts of it. `sizes` are others than COMMON's."""
    import transformers

    common = COMMON | sizes
    if moe:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": intermediate}
        model: Any = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**common, **experts))
    else:
        config = transformers.Qwen3Config(**common | {"intermediate_size": intermediate})
        model = transformers.Qwen3ForCausalLM(config)
    randomise(model, 0, norm_mean=1.0)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_pair(source: Path, to: Path, kind: Kind) -> tuple[Path, Path]:
    """A quantised checkpoint of the one in `source`, and one of its values in fp32."""
    inside: Tensors = {}
    outside: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.ndim != 2 or any(part in name for part in PLAIN):
            inside[name] = outside[name] = tensor
            continue
        tensors, outside[name] = kind.write(name.removesuffix(".weight"), tensor)
        inside |= {each: part.contiguous() for each, part in tensors.items()}
    folders = to / "quantised", to / "values"
    for folder, tensors in zip(folders, (inside, outside), strict=True):
        shutil.copytree(source, folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folders[0], quantization_config=kind.config, dtype=kind.dtype)
    return folders


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
