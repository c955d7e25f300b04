"""Quantises the matrices of one layer, product by product in the order in which the layer uses them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NamedTuple, cast

import torch
from torch import Tensor

from penstock.families import GroupedQuerySpec
from penstock.families.spec import Parameter, TensorSource
from penstock.models.decoder import Hidden
from penstock.quantize.formats.destination import Destination
from penstock.quantize.formats.grid import CodeFormat, Quantized, joined_grids
from penstock.quantize.moments import HELD_OUT, Moments
from penstock.quantize.recorder import RecordingLinear, WeightPlaces
from penstock.quantize.rounding import ChosenCodes, Method, quantize
from penstock.quantize.scaling import awq_scales
from penstock.quantize.stream import StreamedLayer, Windows, batches
from penstock.quantize.workers import Workers
from penstock.weights.reads import row_runs

MOMENTS_BYTES = 1 << 30  # of the experts whose moments are in memory at the same time
# The norm whose result a product alone reads, so that its weight can be divided by what the product's is multiplied by.
_NORM_BEFORE = {"qkv": "attention_norm", "gate_up": "mlp_norm", "up": "mlp_norm"}


class Segment(NamedTuple):
    """Rows of a parameter that are quantised together: sources with one format, of one expert."""

    first: int
    rows: int
    fmt: CodeFormat
    sources: tuple[TensorSource, ...]


@dataclass
class OriginalInputs:
    """What the products of the original's layer read, in the order of their use: for each part of the windows bf16
    [tokens, columns]. Those of experts are empty: a quantised layer may choose other experts."""

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    by_attention: set[str] = field(default_factory=set)  # products before the output projection of attention


@dataclass
class LayerQuantizer:
    """Quantises layers. `methods` are tried for each matrix."""

    destination: Destination
    methods: Sequence[Method]
    scales: bool  # also with AWQ's factors: the better is taken
    choices: list[dict[str, object]] = field(default_factory=list)  # what was chosen for each product
    # By tensor, the parts that are quantised until it is complete: (their rows in the tensor, their codes).
    _pieces: dict[str, list[tuple[Tensor, Quantized]]] = field(default_factory=dict)

    def run(
        self, index: int, layer: StreamedLayer, hidden: Tensor | None, original: Tensor | None, windows: Windows
    ) -> Iterator[str]:
        """Quantises a layer: its matrices in memory get the values of their codes. Yields the name of each product when
        it is done. `hidden` are the hidden states of the calibration's tokens before the layer, and `original` those of
        the original model, or both None; they are replaced by the outputs of the quantised and the original layer."""
        products = {p.name: p for p in layer.spec.parameters if any(self._segments(p))}
        read = OriginalInputs() if original is None else self._original_inputs(layer, original, windows)
        states = None if hidden is None else Hidden(hidden)  # with the output of attention once its products are done
        for name in dict.fromkeys([*(name for name in read.inputs if name in products), *products]):
            parameter = products[name]
            if states is not None and states.attended is None and name not in read.by_attention:
                states = _attend(layer, states.states, windows)
            for experts in _together(parameter):
                moments = dict[int, Moments]()
                if states is not None:
                    original_inputs = read.inputs.pop(name, ())
                    moments = self._moments(layer, parameter, experts, states, original_inputs, windows)
                for choice in self._quantize(layer, parameter, experts, moments):
                    error = None if choice.error != choice.error else round(choice.error, 6)
                    product = f"layers.{index}.{name.removeprefix('layers.0.').removesuffix('.weight')}"
                    self.choices.append({"product": product, "method": choice.method, "error": error})
            yield name
        if hidden is not None and states is not None:
            done = states if states.attended is not None else _attend(layer, hidden, windows)
            for rows, output in layer.by_parts(windows, lambda rows, _: layer.finish(done[rows])):
                hidden[rows] = output

    def _original_inputs(self, layer: StreamedLayer, hidden: Tensor, windows: Windows) -> OriginalInputs:
        """Runs the layer before it is quantised. Returns what its products read, and replaces the hidden states by its
        output."""
        recorder, places = _recorder(layer), WeightPlaces(layer.parameters)
        experts = {p.name for p in layer.spec.parameters if p.experts > 1}
        found = OriginalInputs()

        def run(rows: slice, some: Windows) -> tuple[Tensor, OriginalInputs]:
            read = OriginalInputs()

            def watch(address: int, x: Tensor) -> None:
                if place := places.find(address):
                    read.inputs.setdefault(place[0], []).extend([] if place[0] in experts else [x.bfloat16()])

            with recorder.watched_by(watch):
                attended = layer.attend(hidden[rows], some)
                read.by_attention.update(read.inputs)
                return layer.finish(attended), read

        for rows, (output, read) in layer.by_parts(windows, run):
            hidden[rows] = output
            found.by_attention |= read.by_attention
            for name, inputs in read.inputs.items():
                found.inputs.setdefault(name, []).extend(inputs)
        return found

    def _moments(
        self,
        layer: StreamedLayer,
        parameter: Parameter,
        experts: range,
        states: Hidden,
        original: Sequence[Tensor],
        windows: Windows,
    ) -> dict[int, Moments]:
        """Returns the moments of what a product reads, by the first row of the expert or 0. `states` are those before
        the layer, or after its attention if the product comes later. `original` is what the original's product reads:
        bf16 [tokens, columns] for each part of the windows, or nothing."""
        recorder, places, workers = _recorder(layer), WeightPlaces(layer.parameters), layer.stream.workers

        def inputs(rows: slice, some: Windows) -> list[tuple[int, Tensor]]:
            mine = states[rows]
            execute = partial(layer.attend, mine.states, some) if mine.attended is None else partial(layer.finish, mine)
            return recorder.inputs(places, parameter, experts, execute)

        parts, found = len(list(batches(windows))), dict[int, Moments]()
        split = (len(self.methods) > 1 or self.scales) and parts > 1
        held_out = range(HELD_OUT - 1, parts, HELD_OUT) or (parts - 1,)
        for i, (_, calls) in enumerate(layer.by_parts(windows, inputs)):
            read = original[i].float() if len(original) == parts else None
            for first, x in calls:
                if first not in found:
                    found[first] = Moments(parameter.shape[1], split)
                found[first].add(x, read, held_out=i in held_out, workers=workers)
        return found

    def _segments(self, parameter: Parameter) -> Iterator[Segment]:
        if parameter.kind not in ("matrix", "gated"):
            return
        size = parameter.shape[0] // parameter.experts
        for (fmt, _), group in groupby(parameter.sources, key=lambda s: (self._format(s), s.start // size)):
            sources = tuple(group)
            if fmt is not None:
                yield Segment(sources[0].start, sum(source.rows for source in sources), fmt, sources)

    def _format(self, source: TensorSource) -> CodeFormat | None:
        return self.destination.format_of(source.name) if is_whole_rows(source) else None

    def _quantize(
        self, layer: StreamedLayer, parameter: Parameter, experts: range, moments: dict[int, Moments]
    ) -> list[ChosenCodes]:
        weights = layer.parameters[parameter.name]
        if parameter.experts == 1 and moments:
            weights = moments[0].corrected(weights)
        size = parameter.shape[0] // parameter.experts
        segments = [each for each in self._segments(parameter) if each.first // size in experts]
        scales = self._scales(layer, parameter, weights, segments, moments) if self.scales and moments else None
        workers = layer.stream.workers
        choices = [self._choose(weights, each, moments.get(each.first // size * size), workers) for each in segments]
        if scales is not None:
            moments[0].scaled(scales)
            scaled = [self._choose(weights * scales, segment, moments[0], workers) for segment in segments]
            if sum(c.error for c in scaled) < sum(c.error for c in choices):
                choices = [choice._replace(method=f"awq+{choice.method}") for choice in scaled]
                self._fold(layer, parameter, scales)
        for segment, choice in zip(segments, choices, strict=True):
            layer.parameters[parameter.name][segment.first : segment.first + segment.rows] = choice.weight.values
            for source in segment.sources:
                self._place(source, choice.weight, source.start - segment.first, layer)
        return choices

    def _choose(self, weights: Tensor, segment: Segment, moments: Moments | None, workers: Workers) -> ChosenCodes:
        rows = weights[segment.first : segment.first + segment.rows]
        try:
            return quantize(rows, segment.fmt, self.methods, moments, workers)
        except ValueError as error:
            raise ValueError(f"{', '.join(source.name for source in segment.sources)}: {error}") from None

    def _scales(
        self,
        layer: StreamedLayer,
        parameter: Parameter,
        weights: Tensor,
        segments: Sequence[Segment],
        moments: dict[int, Moments],
    ) -> Tensor | None:
        """Returns AWQ's factors for a product that alone reads a norm, such that the file holds the norm's weight
        divided by them exactly. None where there is no such norm, or no factors help."""
        norm = self._norm_before(layer, parameter)
        if norm is None or sum(segment.rows for segment in segments) < parameter.shape[0]:
            return None
        parts = [(weights[s.first : s.first + s.rows], s.fmt) for s in segments]
        scales = awq_scales(parts, moments[0], layer.stream.workers)
        if scales is None:
            return None
        factor = layer.parameters[f"{norm}.weight"] + layer.spec.norm_offset
        divided = self.destination.stored_floats(
            _source(layer, f"{norm}.weight"), factor / scales - layer.spec.norm_offset
        )
        if divided is None:
            return None
        divided = divided + layer.spec.norm_offset
        return torch.where((divided == 0) | (factor == 0), 1.0, factor / divided)

    def _norm_before(self, layer: StreamedLayer, parameter: Parameter) -> str | None:
        """Returns the norm that only this product reads."""
        (spec,) = layer.spec.layers
        name = parameter.name.removeprefix("layers.0.").removesuffix(".weight")
        alone = isinstance(spec.attention, GroupedQuerySpec) and not spec.attention.gate and spec.moe is None
        if not alone or not spec.pre_norms or spec.parallel or name not in _NORM_BEFORE:
            return None
        return f"layers.0.{_NORM_BEFORE[name]}"

    def _fold(self, layer: StreamedLayer, parameter: Parameter, scales: Tensor) -> None:
        """Divides the norm before a product by the factors, in memory and in the file."""
        norm, offset = self._norm_before(layer, parameter), layer.spec.norm_offset
        for kind in ("weight", "bias"):
            vector = layer.parameters.get(f"{norm}.{kind}")
            if vector is None:
                continue
            shift, source = offset if kind == "weight" else 0.0, _source(layer, f"{norm}.{kind}")
            stored = self.destination.stored_floats(source, (vector + shift) / scales - shift)
            assert stored is not None, "the file holds such values"
            vector.copy_(stored)
            self.destination.write_floats(source, stored)

    def _place(self, source: TensorSource, weight: Quantized, first: int, layer: StreamedLayer) -> None:
        """Writes a source's rows, in the order of its tensor. A tensor that several sources have is written when it is
        complete."""
        order = [torch.arange(at, at + count * step, step) for at, _, count, step in row_runs(source)]
        pieces = self._pieces.setdefault(source.name, [])
        pieces.append((torch.cat(order), weight.rows(torch.arange(first, first + source.rows))))
        every = [s for p in layer.spec.parameters for s in p.sources if s.name == source.name]
        if sum(len(index) for index, _ in pieces) < sum(each.rows for each in every):
            return
        index = torch.cat([index for index, _ in pieces]).argsort()
        codes = torch.cat([piece.codes for _, piece in pieces])
        whole = Quantized(codes, joined_grids([piece.grid for _, piece in pieces], 0))
        self.destination.put(source.name, whole.rows(index))
        del self._pieces[source.name]


def _attend(layer: StreamedLayer, hidden: Tensor, windows: Windows) -> Hidden:
    parts = layer.by_parts(windows, lambda rows, some: layer.attend(hidden[rows], some).attended)
    return Hidden(hidden, torch.cat([attended for _, attended in parts if attended is not None]))


def _together(parameter: Parameter) -> Iterator[range]:
    """Yields the experts of a parameter whose moments are in memory at the same time."""
    count = max(1, MOMENTS_BYTES // (8 * parameter.shape[1] ** 2))
    for first in range(0, parameter.experts, count):
        yield range(first, min(first + count, parameter.experts))


def _recorder(layer: StreamedLayer) -> RecordingLinear:
    return cast(RecordingLinear, layer.stream.kernels.linear)


def is_whole_rows(source: TensorSource) -> bool:
    """Whether a source is rows of a tensor that has one matrix, as it is multiplied with."""
    return not source.transposed and not source.columns and not source.name.endswith("]")


def _source(layer: StreamedLayer, name: str) -> str:
    parameter = next(p for p in layer.spec.parameters if p.name == name)
    return parameter.sources[0].name
