"""Executes a decoder of torch's modules with our kernels alone, if one forward of it shows that these compute all."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from penstock.kernels import Kernels
from penstock.models.attention import LayerCache
from penstock.models.decoder import StepInput
from penstock.models.packed_modules import ModulePacking, PackedLinear
from penstock.models.traced.body import TracedBody, check_packable
from penstock.models.traced.graph import GraphReader, NotRecognised, ProductNode, TorchNode
from penstock.models.traced.rotary import rotations_of
from penstock.models.traced.trace import Leaf, Trace, beside_attention, leaves_of

# The positions of a trace's tokens, besides the last of a context: of any order, so that a token depends on its own.
POSITIONS = (1, 0, 3, 2, 7, 5000, 50, 200, 20_000, 1000)


class TracedDecoder:
    """The ops of a model from token ids to logits.

    The constructor traces the model and packs its weights. Raises NotRecognised before anything is changed."""

    def __init__(
        self,
        model: nn.Module,
        kernels: Kernels,
        groups: Sequence[int],
        sizes: tuple[int, int, int],
        body: Callable[[Trace, Tensor, Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
    ) -> None:
        """`groups` has the KV group of each layer; `sizes` are those of the vocabulary, the context and a head. `body`
        computes hidden states from ids and positions [1, tokens], and `head` logits from hidden states."""
        vocab, context, head_dim = sizes
        leaves, dtype = leaves_of(model), next(model.parameters()).dtype
        positions = torch.tensor([[context - 1, *(place % context for place in POSITIONS)]])
        ids = torch.arange(positions.numel())[None] % vocab
        rotations = rotations_of(model, head_dim)

        def read(leaves: Mapping[nn.Module, Leaf]) -> tuple[Trace, Tensor]:
            trace = Trace(leaves)
            with _recording(trace):
                output = body(trace, ids, positions)
            return trace, output

        trace, output = read(leaves)
        try:
            nodes = GraphReader(trace, leaves, (ids, positions), rotations).order(output)
        except NotRecognised:  # then torch computes the modules that are not known
            own = Leaf(None, 0, dtype, by_torch=True)
            leaves = {**dict.fromkeys(beside_attention(model, trace), own), **leaves}
            trace, output = read(leaves)
            nodes = GraphReader(trace, leaves, (ids, positions), rotations).order(output)
        states, head_trace = torch.randn(output.shape).to(dtype), Trace(leaves)
        with _recording(head_trace):
            logits = head(states)
        above = GraphReader(head_trace, leaves, (states,)).order(logits)
        if len(above) != 2 or not isinstance(above[1], ProductNode):
            raise NotRecognised("logits are more than a product with hidden states")
        head_name = next(name for name, module in model.named_modules() if module is above[1].module)
        packing = ModulePacking(model)
        check_packable(model, [*nodes, above[1]], packing, len(groups), dtype)
        # The classes of modules that torch computes.
        self.by_torch = sorted({type(node.module).__name__ for node in nodes if isinstance(node, TorchNode)})
        self._body = TracedBody(model, nodes, packing, kernels, groups, dtype)
        self.nbytes = self._body.nbytes
        packed_head = model.get_submodule(head_name)
        assert isinstance(packed_head, PackedLinear), "`check_packable` has let it pass"
        self._head = packed_head.product

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> Tensor:
        """Returns the last hidden states, normed. Writes keys and values to `caches`."""
        return self._body(step, caches)

    def logits(self, states: Tensor) -> Tensor:
        """As Decoder.logits."""
        return self._head.logits(states)


@contextmanager
def _recording(trace: Trace) -> Iterator[None]:
    """Records what is called within. An error raises NotRecognised: the check at the start reports it if the trace was
    not its cause."""
    try:
        with trace.recording():
            yield
    except Exception as error:
        raise NotRecognised(f"{type(error).__name__}: {error}") from error
