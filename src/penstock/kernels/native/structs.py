"""The structs that native code takes: a mirror of cpp/ops.h and cpp/pack.h, field by field."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

from penstock.kernels.native.step_structs import AdvanceOp, FillOp, SampleOp

F32, BF16, I8 = range(3)
SCHEMES = ("f32", "bf16", "int16", "grouped")
CODES = ("bytes", "nibbles", "iq4", "mxfp4")
SCALES = ("f16", "f32", "two_levels", "by_column")
EPILOGUES = ("", "silu", "gelu_tanh", "gelu", "swiglu_oai")  # of gated weights, in the order of Epilogue,
UNGATED = ("silu", "gelu_tanh", "gelu", "relu", "relu_squared")  # and those that follow


def epilogue(activation: str, *, gated: bool) -> int:
    """The number of an activation in Epilogue."""
    return EPILOGUES.index(activation) if gated else len(EPILOGUES) + UNGATED.index(activation)


class Format(ctypes.Structure):
    _fields_ = (
        ("scheme", c_int32),
        ("codes", c_int32),
        ("scales", c_int32),
        ("mins", c_int32),
        ("group", c_int32),
        ("zero", c_int32),
    )


class Matrix(ctypes.Structure):
    _fields_ = (
        ("lines", c_void_p),
        ("column_scales", c_void_p),
        ("scales", c_void_p),
        ("mins", c_void_p),
        ("super_scales", c_void_p),
        ("super_mins", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("format", Format),
    )


class EmbeddingOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("ids", c_void_p),
        ("table", Matrix),
        ("out", c_void_p),
        ("scale", c_float),
        ("dtype", c_int32),
        ("first", c_int64),
    )


class NormOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("x", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("normed", c_void_p),
        ("sum", c_void_p),
        ("width", c_int64),
        ("eps", c_float),
        ("offset", c_float),
        ("scale", c_float),
        ("centered", c_int32),
        ("dtype", c_int32),
    )


class LinearOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("x", c_void_p),
        ("weight", Matrix),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("epilogue", c_int32),
        ("dtype", c_int32),
        ("out_dtype", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("heads", c_int64),
        ("stride", c_int64),
    )


class RouteOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("logits", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("experts", c_void_p),
        ("weights", c_void_p),
        ("count", c_int64),
        ("slots", c_int64),
        ("groups", c_int64),
        ("kept", c_int64),
        ("scale", c_float),
        ("normalize", c_int32),
        ("sigmoid", c_int32),
        ("by_pairs", c_int32),
    )


class ExpertsOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("x", c_void_p),
        ("chosen", c_void_p),
        ("weights", c_void_p),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("shared", c_void_p),
        ("shared_gate", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("tally", c_void_p),
        ("slots", c_int64),
        ("first", c_int64),
        ("held", c_int64),
        ("epilogue", c_int32),
        ("weigh_inputs", c_int32),
        ("dtype", c_int32),
    )


class RotationOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("positions", c_void_p),
        ("frequencies", c_void_p),
        ("out", c_void_p),
        ("half", c_int64),
        ("every", c_int64),
        ("first", c_int64),
        ("temperature", c_float),
    )


class CacheOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("qkv", c_void_p),
        ("weight", c_void_p),
        ("rotation", c_void_p),
        ("blocks", c_void_p),
        ("offsets", c_void_p),
        ("query", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("rotation_stride", c_int64),
        ("query_rotation", c_int64),
        ("eps", c_float),
        ("offset", c_float),
        ("whole", c_int32),
        ("centered", c_int32),
        ("norm_values", c_int32),
        ("dtype", c_int32),
        ("page_dtype", c_int32),
    )


class AttentionOp(ctypes.Structure):
    _fields_ = (
        ("item_count", c_void_p),
        ("merge_count", c_void_p),
        ("items", c_void_p),
        ("merges", c_void_p),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("query", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("out", c_void_p),
        ("partials", c_void_p),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("value_dim", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("dtype", c_int32),
        ("page_dtype", c_int32),
        ("bidirectional", c_int32),
        ("chunked", c_int32),
    )


class PackJob(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("row_stride", c_int64),
        ("weight", Matrix),
        ("first", c_int64),
        ("count", c_int64),
        ("stored", c_int32),
        ("gated", c_int32),
    )


class RecurrenceOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("sequences", c_void_p),
        ("units", c_void_p),
        ("units_stride", c_int64),
        ("inputs", c_void_p),
        ("rates", c_void_p),
        ("states", c_void_p),
        ("state_stride", c_int64),
        ("conv", c_void_p),
        ("conv_bias", c_void_p),
        ("decay", c_void_p),
        ("step_bias", c_void_p),
        ("skip", c_void_p),
        ("norm", c_void_p),
        ("out", c_void_p),
        ("key_heads", c_int64),
        ("heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("taps", c_int64),
        ("norm_width", c_int64),
        ("norm_size", c_int64),
        ("eps", c_float),
        ("dtype", c_int32),
        ("tiled", c_int32),
    )


class GateOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("x", c_void_p),
        ("gate", c_void_p),
        ("out", c_void_p),
        ("width", c_int64),
        ("plain", c_int32),
        ("dtype", c_int32),
    )


class LatentOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("absorbed", c_void_p),
        ("rotated", c_void_p),
        ("latent", c_void_p),
        ("key", c_void_p),
        ("rotation", c_void_p),
        ("blocks", c_void_p),
        ("offsets", c_void_p),
        ("query", c_void_p),
        ("pages", c_void_p),
        ("heads", c_int64),
        ("rank", c_int64),
        ("rope", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("dtype", c_int32),
    )


class FiniteOp(ctypes.Structure):
    _fields_ = (("rows", c_void_p), ("x", c_void_p), ("finite", c_void_p), ("width", c_int64), ("dtype", c_int32))


class GatherOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("x", c_void_p),
        ("order", c_void_p),
        ("out", c_void_p),
        ("width", c_int64),
        ("dtype", c_int32),
    )


AnyOp = (
    EmbeddingOp
    | NormOp
    | LinearOp
    | RotationOp
    | CacheOp
    | AttentionOp
    | SampleOp
    | RouteOp
    | ExpertsOp
    | FillOp
    | AdvanceOp
    | FiniteOp
    | RecurrenceOp
    | GateOp
    | LatentOp
    | GatherOp
)
OPS: tuple[tuple[str, type[ctypes.Structure]], ...] = (  # in the order of OpCode
    ("embedding", EmbeddingOp),
    ("norm", NormOp),
    ("linear", LinearOp),
    ("rotation", RotationOp),
    ("cache", CacheOp),
    ("attention", AttentionOp),
    ("sample", SampleOp),
    ("route", RouteOp),
    ("experts", ExpertsOp),
    ("fill", FillOp),
    ("advance", AdvanceOp),
    ("finite", FiniteOp),
    ("recurrence", RecurrenceOp),
    ("gate", GateOp),
    ("latent", LatentOp),
    ("gather", GatherOp),
)


class _Ops(ctypes.Union):
    _fields_ = OPS


class TaggedOp(ctypes.Structure):
    """An op and the code of its kind."""

    _fields_ = (("code", c_int32), ("op", _Ops))
