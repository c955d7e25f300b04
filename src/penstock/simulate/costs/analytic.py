"""The time of a step from a model's sizes and a device's speed.

A step's products with weights take the time of reading the weights and that of the operations, joined by a norm:
kernels overlap the two, but not wholly. Attention of decodes reads pages, attention of prompts computes. Sums over
tensor ranks, launches and the host come on top. The sizes are those by which the engine plans memory
(`families.step_cost`).
"""

from dataclasses import dataclass, field

from penstock.config import EngineConfig, MemoryPlan, ModelFacts, size_ranks
from penstock.config.memory import gpu_budget, token_bytes
from penstock.families import ModelSpec, check_split, model_facts, rank_facts
from penstock.families.kinds.attention import GroupedQuerySpec
from penstock.families.step_cost import step_cost
from penstock.simulate.costs.devices import SimulatedDevice
from penstock.simulate.costs.work import StepLoad

OVERLAP = 1.6  # exponent of the norm that joins reading and computing: 1 adds them, infinity takes the longer one
FEW = 512  # token counts up to which the time of products is kept for each count; above for each 32


@dataclass
class AnalyticCost:
    """The cost of steps of one model on one replica, which has a device for each rank of `engine.split`."""

    spec: ModelSpec
    engine: EngineConfig
    device: SimulatedDevice
    _products: dict[int, float] = field(default_factory=dict)  # seconds of products, by the number of tokens

    def __post_init__(self) -> None:
        spec, engine, device = self.spec, self.engine, self.device
        split = engine.split
        group = engine.quantization_group if engine.quantization == "int4" else 1
        check_split(spec, split, group)
        self.ranks: tuple[ModelFacts, ...] = rank_facts(spec, split, group)
        self.whole = model_facts(spec)
        eight_bits = engine.quantization == "fp8" or (engine.quantization != "none" and device.kind == "cpu")
        flops = device.flops8 if eight_bits else device.flops
        self._flops = flops * device.multiplies
        self._read = device.bandwidth * device.reads
        # A token of context that a decode reads: all layers of a rank, one stage after the other.
        groups = [token_bytes(facts, engine) for facts in self.ranks[:: split.tensor]]
        self._kv_bytes = [sum(sizes) for sizes in zip(*groups, strict=True)]
        self._windows = [each.window.tokens for each in self.whole.groups]
        self._pages = device.bandwidth * device.reads_pages
        heads = [layer.attention for layer in spec.layers if isinstance(layer.attention, GroupedQuerySpec)]
        self._pair_seconds = sum(4.0 * each.query_width for each in heads) / (
            split.tensor * device.flops * device.attends
        )
        self._fixed = device.step_seconds + len(spec.layers) * device.layer_seconds
        self._fixed += (split.pipeline - 1) * 30e-6  # a hand-over between stages
        if split.tensor > 1:
            self._fixed += sum(layer.sums for layer in spec.layers) * device.sum_seconds
        self._token_seconds = device.passes * spec.hidden_size * len(spec.layers) / device.bandwidth
        self._row_seconds = device.row_seconds
        self._head = 2.0 * self.whole.vocab_size * self.whole.hidden_size / (split.tensor * self._flops)
        self.stages = split.pipeline

    def seconds(self, work: StepLoad) -> float:
        """See StepCostModel."""
        tokens = work.decodes + work.prompt_tokens
        size = tokens if tokens <= FEW else -(-tokens // 32) * 32
        products = self._products.get(size)
        if products is None:
            products = self._products[size] = self._products_seconds(size)
        seconds = (
            products + self._fixed + tokens * self._token_seconds + work.sampled * (self._row_seconds + self._head)
        )
        if work.decodes:
            seconds += self._page_bytes(work.decodes, work.decode_context) / self._pages
        if work.prompt_tokens:
            seconds += work.prompt_pairs * self._pair_seconds
            seconds += work.prompt_context * self._kv_bytes[0] / self._pages
        return seconds

    def _page_bytes(self, rows: int, context: int) -> float:
        """Returns the bytes of pages that decodes read. In a group with a window, a row reads no more than that."""
        total = 0.0
        for size, window in zip(self._kv_bytes, self._windows, strict=True):
            total += size * (min(context, rows * window) if window else context)
        return total

    def _products_seconds(self, tokens: int) -> float:
        """Returns the seconds of all products with the layers' weights in a step of so many tokens, and of links."""
        engine, device, split = self.engine, self.device, self.engine.split
        cost = step_cost(self.spec, engine, self.ranks, tokens, 0, shared=False)
        reading = cost.read / self._read
        computing = 2.0 * self.whole.parameters_per_token * tokens / (split.tensor * self._flops)
        return float(
            (reading**OVERLAP + computing**OVERLAP) ** (1 / OVERLAP) + cost.linked / (device.link * device.links)
        )

    @property
    def memory(self) -> MemoryPlan:
        """The memory plan of the rank with the least room. Raises DoesNotFit."""
        total = self.device.memory
        available = gpu_budget(total, self.engine) if self.device.kind == "cuda" else int(total * 0.9)
        plans = size_ranks(self.ranks, self.engine, [available] * len(self.ranks))
        return min(plans, key=lambda plan: plan.kv_tokens)
