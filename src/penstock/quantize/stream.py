"""Executes a model one layer at a time: many windows of tokens go through a layer before the next one is read.

So the weights of one layer are in memory, and the hidden states of all windows. The layers are those that the engine
executes (models/block.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.families import ModelSpec
from penstock.families.spec import Parameter, TensorSource
from penstock.kernels import Kernels, Packing
from penstock.kernels.attention import AttentionBatch
from penstock.models import GroupInput, LayerCache, LayerParameters
from penstock.models.attention import ATTENTION_KINDS
from penstock.models.block import Block
from penstock.models.decoder import Hidden
from penstock.models.rope import rotary_frequencies
from penstock.quantize.workers import Workers
from penstock.weights.load import load_parameters

T = TypeVar("T")

Windows = Sequence[Sequence[int]]  # token ids
BLOCK = 16  # tokens of a page
TOKENS_AT_ONCE = 2048  # of a forward pass; at least one window
HEAD_ROWS = 128  # tokens whose logits are in memory
HEAD_COLUMNS = 16384  # logits that are computed at once from weights that are widened for it


def cannot_stream(spec: ModelSpec) -> str | None:
    """Returns why the layers of a model cannot be executed one by one, or None if they can."""
    if spec.encoder is not None or spec.pooling is not None:
        return "it gives vectors, not text"
    if spec.transformers is not None:
        return "transformers executes it"
    if spec.whole_stages:
        return "its layers read data of other layers"
    if spec.state_layers:
        return "it has layers with states"
    return None


@dataclass(frozen=True)
class LayerStream:
    """Reads the layers of a model, one at a time. With `packing` the kernels multiply with weights that it packed;
    without, all is fp32 in torch."""

    model: Path  # a folder, or a GGUF file
    spec: ModelSpec
    kernels: Kernels
    dtype: torch.dtype
    packing: Packing | None = None
    workers: Workers = field(default_factory=Workers)

    def layer(self, index: int) -> "StreamedLayer":
        """Reads a layer. Raises CheckpointError and OSError."""
        prefix = f"layers.{index}."
        own = [p for p in self.spec.parameters if p.name.startswith(prefix)]
        renamed = tuple(replace(p, name=f"layers.0.{p.name.removeprefix(prefix)}") for p in own)
        layer = self.spec.layers[index]
        spec = replace(self.spec, layers=(layer,), parameters=renamed, duplicates=())
        return StreamedLayer(self, spec, self._read(spec, self.dtype))

    def embed(self, windows: Windows) -> Tensor:
        """Returns the embeddings of the windows' tokens, [tokens, hidden]."""
        parameters = self._outer()
        ids = torch.tensor([token for window in windows for token in window])
        outer = LayerParameters(parameters, "", self.kernels)
        positions = "embedding.positions.weight" in parameters
        rows = [(outer.matrix("embedding"), ids, self.spec.embedding_scale)]
        if positions:
            places = torch.cat([torch.arange(len(window)) for window in windows])
            rows.append((outer.matrix("embedding.positions"), places, 1.0))
        hidden: Tensor = sum(table.rows(index, scale, self.dtype).to(self.dtype) for table, index, scale in rows)  # type: ignore[assignment]
        return hidden

    def head(self) -> Callable[[Tensor], Tensor]:
        """Returns a function that computes the fp32 logits [rows, vocab] of hidden states [rows, hidden]."""
        spec, parameters = self.spec, self._outer()
        if self.packing is None:
            parameters = {name: each.float() if each.dim() == 1 else each for name, each in parameters.items()}
        outer = LayerParameters(parameters, "", self.kernels)
        norm = outer.norm("norm", spec)
        head = outer.matrix("embedding" if spec.tie_embeddings else "head")
        kernels, narrow = self.kernels, self.packing is None

        def logits(hidden: Tensor) -> Tensor:
            if not narrow:
                return head.logits(norm(kernels, hidden)[0], scale=spec.logit_scale, softcap=spec.logit_softcap)
            normed, weight = norm(kernels, hidden)[0], head.weight.weight
            pieces = [normed @ each.float().T for each in weight.split(HEAD_COLUMNS)]
            result = torch.cat(pieces, 1) * spec.logit_scale
            if head.weight.bias is not None:
                result += head.weight.bias
            return spec.logit_softcap * torch.tanh(result / spec.logit_softcap) if spec.logit_softcap else result

        return logits

    def read_rows(self, parameter: Parameter, source: TensorSource) -> Tensor:
        """Returns a part of a parameter as fp32 [rows, columns]: the rows that `source` names."""
        spec = replace(self.spec, parameters=(parameter.of([source]),), duplicates=())
        rows: Tensor = self._read(spec, torch.float32)[parameter.name]
        return rows

    def _outer(self) -> dict[str, Any]:
        """Reads what is outside the layers. Without packing it keeps the dtype of the checkpoint: these are the largest
        matrices, and they are widened in parts."""
        own = tuple(p for p in self.spec.parameters if not p.name.startswith("layers."))
        narrow = self.packing is None and self.spec.scheme is None
        dtype = getattr(torch, self.spec.checkpoint_dtype) if narrow else self.dtype
        return self._read(replace(self.spec, parameters=own, duplicates=()), dtype)

    def _read(self, spec: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
        return load_parameters(self.model, spec, dtype, whole=self.spec, packing=self.packing, progress=False)


@dataclass
class StreamedLayer:
    """One layer in memory. Without packing, `parameters` are its weights, and changes of them take effect."""

    stream: LayerStream
    spec: ModelSpec  # of the layer alone, as layer 0
    parameters: dict[str, Any]

    @cached_property
    def _block(self) -> Block:
        parameters = LayerParameters(dict(self.parameters), "layers.0.", self.stream.kernels)
        return Block(self.spec.layers[0], self.spec, parameters, None, ATTENTION_KINDS)

    @cached_property
    def _frequencies(self) -> Tensor | None:
        rotary = self._block.rotary
        return rotary and rotary_frequencies(*rotary, self.stream.spec.max_position)

    def executed_by(self, kernels: Kernels) -> "StreamedLayer":
        """Returns this layer, with the same weights in memory, executed by other kernels."""
        return replace(self, stream=replace(self.stream, kernels=kernels))

    def forward(self, hidden: Tensor, windows: Windows) -> None:
        """Replaces the hidden states of the windows' tokens [tokens, hidden], which the layer reads, by its output."""
        for rows, output in self.by_parts(windows, lambda rows, some: self.finish(self.attend(hidden[rows], some))):
            hidden[rows] = output

    def by_parts(self, windows: Windows, function: Callable[[slice, Windows], T]) -> Iterator[tuple[slice, T]]:
        """Calls `function`, by the workers, for windows that go through the layer together and the rows of their
        tokens. Yields these rows with the result, in order."""
        parts = list(batches(windows))
        results = self.stream.workers.map(lambda part: function(*part), parts)
        return zip((rows for rows, _ in parts), results, strict=True)

    def attend(self, hidden: Tensor, windows: Windows) -> Hidden:
        """Runs the layer up to the output projection of its attention, for the hidden states [tokens, hidden] of some
        windows."""
        (layer,), block, kernels = self.spec.layers, self._block, self.stream.kernels
        lengths = np.array([len(window) for window in windows], np.int64)
        ends = np.concatenate(([0], np.cumsum(lengths)))
        counts = -(-lengths // BLOCK)
        tables = 1 + np.arange(len(windows) * counts.max()).reshape(len(windows), -1)  # block 0 is the null page
        size = (1 + tables.size, *layer.attention.page.size(BLOCK, self.stream.dtype.itemsize))
        cache = LayerCache(torch.zeros(size, dtype=self.stream.dtype).unbind(1))
        positions = torch.cat([torch.arange(int(length)) for length in lengths])
        sequence = torch.from_numpy(np.repeat(np.arange(len(windows)), lengths))
        blocks = torch.from_numpy(tables)[sequence, positions // BLOCK]
        batch = AttentionBatch(BLOCK, self.spec.windows[layer.kv_group], ends, lengths, tables)
        group = GroupInput(kernels.attention.prepare(batch, cache.keys), blocks, positions % BLOCK)
        rotation = None
        if block.rotary is not None and self._frequencies is not None:
            temperature = block.rotary[0].temperature
            rotation = kernels.attention.rotation(positions, self._frequencies, self.stream.dtype, temperature)
        return Hidden(*block.attend(hidden.contiguous(), None, rotation, group, cache))

    def finish(self, hidden: Hidden) -> Tensor:
        """Runs the rest of the layer on rows that `attend` returned. Returns the layer's output [rows, hidden]."""
        assert hidden.attended is not None, "`attend` returned it"
        return self._block.add(*self._block.finish(hidden.attended, hidden.states), self._block.output_scale)


def batches(windows: Windows) -> Iterator[tuple[slice, Windows]]:
    """Yields windows that go through a layer together, each with the rows of their tokens."""
    starts = [0, *accumulate(len(window) for window in windows)]
    first = 0
    for i in range(1, len(windows) + 1):
        if i == len(windows) or starts[i + 1] - starts[first] > TOKENS_AT_ONCE:
            yield slice(starts[first], starts[i]), windows[first:i]
            first = i
