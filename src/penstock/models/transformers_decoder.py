"""Executes a decoder with transformers' code, and attention with our kernels and paged KV cache.

This is the only module that imports transformers. Its code is that of the installed package, never of a model's folder.
"""

import copy
import ctypes
import gc
import json
import logging
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._meta_registrations  # transformers makes tensors without data; see penstock.runtime.loading.quick_torch
import transformers
from torch import Tensor, nn

from penstock.families import GroupedQuerySpec, ModelSpec, UnsupportedModel
from penstock.kernels import Kernels
from penstock.kernels.attention import unscaled
from penstock.models.attention import GroupInput, LayerCache
from penstock.models.decoder import Hidden, StepInput
from penstock.models.packed_modules import ModulePacking, their_forwards

NAME = "penstock"  # of our attention in transformers' AttentionInterface, and of a module's _AttentionStep

# Keyword arguments that change nothing here: positions are applied already, and nothing is dropped or returned.
_WITHOUT_EFFECT = {"dropout", "position_ids", "cache_position", "use_cache", "position_embeddings"}
NAMED = 5  # tensors that an error names
_OFF = {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "deterministic"}

logger = logging.getLogger(__name__)


@dataclass
class _AttentionStep:
    """Holds what attention reads of the present step. Every attention module of a model refers to it."""

    kernels: Kernels
    spec: ModelSpec
    rotation: Any = None  # by no angle
    groups: Sequence[GroupInput] = ()
    caches: Sequence[LayerCache] = ()
    attended: list[int] = field(default_factory=list)  # layers, in the order of their calls

    def refuse(self, layer: int, what: str) -> UnsupportedModel:
        code = self.spec.transformers
        assert code is not None
        return UnsupportedModel(
            f"transformers' code of {code.architecture} cannot be used: the attention of layer {layer} {what}; use a "
            "model of another architecture (see `penstock models`)"
        )


class TransformersDecoder:
    """Executes a spec with `transformers`, as Decoder executes others. `parameters` are the checkpoint's tensors.

    Raises UnsupportedModel if transformers needs other tensors, or has no such class."""

    def __init__(self, spec: ModelSpec, parameters: MutableMapping[str, Any], kernels: Kernels) -> None:
        assert spec.transformers is not None, "the spec is of a model that transformers executes"
        self.code = spec.transformers
        self._step = _AttentionStep(kernels, spec)
        self._model = _load(spec, parameters)
        parameters.clear()
        self._dtype = self._model.dtype
        attention = spec.layers[0].attention
        assert isinstance(attention, GroupedQuerySpec)
        self._frequencies = unscaled(torch.zeros(attention.head_dim // 2))
        for module in self._model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, NAME, self._step)
        self._prefix = self._model.base_model_prefix
        self._body = getattr(self._model, self._prefix)
        self._stand_in = _StandInBody()
        self._packed_bytes = ModulePacking(self._model).pack(kernels) if kernels.session else 0
        self._head = self._with_stand_in()
        _free_garbage()

    @property
    def recordable(self) -> bool:
        return False

    @property
    def execution(self) -> str:
        """Says what executes the model, for people."""
        return (
            f"{self.code.architecture} is executed by transformers {self.code.version} with our attention, which is "
            "slower than the models that `penstock models` lists"
        )

    def _with_stand_in(self) -> Any:
        """The same model with another body: its forward is the head, with all that this family does to logits."""
        head = copy.copy(self._model)
        head.__dict__["_modules"] = {**self._model._modules, self._prefix: self._stand_in}
        return head

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all weights. Tied tensors count once."""
        tensors: dict[int, int] = {tensor.data_ptr(): tensor.nbytes for tensor in self._model.parameters()}
        return sum(tensors.values()) + self._packed_bytes

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> Hidden:
        """As Decoder.forward: returns the normed hidden states."""
        state = self._step
        state.groups, state.caches, state.attended = step.groups, caches, []
        state.rotation = state.kernels.attention.rotation(step.positions, self._frequencies, self._dtype)
        output = self._body(input_ids=step.token_ids[None], position_ids=step.positions[None], use_cache=False)
        if state.attended != list(range(len(caches))):
            missed = next((i for i in range(len(caches)) if state.attended.count(i) != 1), 0)
            raise state.refuse(missed, f"called ours {state.attended.count(missed)} times, not once and in order")
        return Hidden(output.last_hidden_state[0])

    def logits(self, hidden: Hidden) -> Tensor:
        """As Decoder.logits."""
        self._stand_in.states = hidden.states[None]
        logits: Tensor = self._head(input_ids=torch.zeros((1, len(hidden)), dtype=torch.int64), use_cache=False).logits
        return logits[0].float()

    def vectors(self, hidden: Hidden) -> Tensor:
        """As Decoder.vectors."""
        return hidden.states

    def reference(self, token_ids: Tensor) -> Tensor:
        """Returns transformers' own fp32 logits [tokens, vocab] for int64 ids [tokens]: with its eager attention, and
        its forwards of norms and MLPs. Only the products of linears are ours."""
        self._model.set_attn_implementation("eager")
        try:
            with their_forwards(self._model):
                logits: Tensor = self._model(input_ids=token_ids[None], use_cache=False).logits[0].float()
        finally:
            self._model.set_attn_implementation(NAME)
        return logits


class _StandInBody(nn.Module):
    """Returns given hidden states in place of a model's body."""

    states: Tensor

    def forward(self, *arguments: Any, **keywords: Any) -> "_Output":
        return _Output(self.states)


class _Output:
    """The output of a body. All that a head may read besides hidden states is None."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def _free_garbage() -> None:
    """Gives memory that loading and packing no longer need back to the system. The engine collects no cycles while it
    starts, and the C library keeps what was freed."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def _load(spec: ModelSpec, parameters: MutableMapping[str, Any]) -> Any:
    """Returns transformers' model with the parameters as its weights. Raises UnsupportedModel."""
    code = spec.transformers
    assert code is not None, "the spec is of a model that transformers executes"
    model_class = getattr(transformers, code.architecture, None)
    if model_class is None or not issubclass(model_class, transformers.PreTrainedModel):
        raise UnsupportedModel(f"transformers {code.version} has no class {code.architecture}")
    transformers.AttentionInterface.register(NAME, _attend)
    tensors = {p.sources[0].name: parameters[p.name] for p in spec.parameters}
    dtype = next(tensor.dtype for tensor in tensors.values() if tensor.dim() > 1)
    with _quiet(), refusing(code.architecture):
        model, report = model_class.from_pretrained(
            None,
            config=model_class.config_class.from_dict(json.loads(code.config)),
            state_dict=tensors,
            dtype=dtype,
            attn_implementation=NAME,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are refused below
            output_loading_info=True,
        )
    for what, names in (
        ("has no tensor", report["missing_keys"]),
        ("has the unexpected tensor", report["unexpected_keys"]),
        ("has tensors of another shape:", report["mismatched_keys"]),
    ):
        if names:
            listed = ", ".join(sorted(str(name[0] if isinstance(name, tuple) else name) for name in names)[:NAMED])
            raise UnsupportedModel(f"the checkpoint {what} {listed}, says transformers' code of {code.architecture}")
    return model.eval()


@contextmanager
def refusing(architecture: str) -> Iterator[None]:
    """Turns an error of transformers' code, which the model's files cause, into UnsupportedModel."""
    try:
        yield
    except UnsupportedModel:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0][:200]
        raise UnsupportedModel(
            f"transformers' code of {architecture} cannot be used: {type(error).__name__}: {first}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from printing a progress bar and a report of its own."""
    logs = transformers.utils.logging
    verbosity, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(verbosity)
        if bars:
            logs.enable_progress_bar()


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Stores keys and values, which have their positions, and attends to the pages: transformers' attention function
    for [1, heads, tokens, head_dim]. Returns [1, tokens, heads, head_dim]. Raises UnsupportedModel."""
    state: _AttentionStep | None = getattr(module, NAME, None)
    if state is None:
        raise UnsupportedModel(f"{type(module).__name__} of transformers cannot be used: it has no layer_idx")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    spec = state.spec.layers[layer]
    attention = spec.attention
    assert isinstance(attention, GroupedQuerySpec)
    tokens, heads, kv_heads, size = query.shape[2], attention.num_heads, attention.num_kv_heads, attention.head_dim
    expected = [(1, heads, tokens, size), (1, kv_heads, tokens, size), (1, kv_heads, tokens, size)]
    if (shapes := [tuple(each.shape) for each in (query, key, value)]) != expected:
        raise state.refuse(layer, f"has queries, keys and values {shapes}, where config.json says {expected}")
    if attention_mask is not None or is_causal is False:
        raise state.refuse(layer, "has a mask of its own")
    seen, window = sliding_window or 0, state.spec.windows[spec.kv_group].tokens
    if (seen if seen < state.spec.max_position else 0) != window:
        raise state.refuse(layer, f"has the window {seen}, where config.json says {window}")
    for name, given in others.items():
        if given is not None and name not in _WITHOUT_EFFECT and not (name in _OFF and given is False):
            raise state.refuse(layer, f"takes {name}, which ours does not have")
    scale, softcap = size**-0.5 if scaling is None else scaling, softcap or 0.0
    sinks = None if s_aux is None else s_aux.float()
    group, cache = state.groups[spec.kv_group], state.caches[layer]
    kernel, dtype = state.kernels.attention, cache.keys.dtype
    by_token = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    qkv = torch.cat(by_token, 2).view(tokens, -1).to(dtype)
    where = cache.keys, cache.values, group.blocks, group.offsets
    stored = kernel.store(qkv, heads, None, state.rotation, *where, 0.0, 0.0)
    attended = kernel(stored, cache.keys, cache.values, group.attention, scale, softcap=softcap, sinks=sinks)
    state.attended.append(layer)
    return attended.view(1, tokens, heads, size).to(query.dtype), None
