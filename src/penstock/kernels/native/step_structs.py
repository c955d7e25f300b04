"""The structs of the ops around a model's: the inputs of a step, the choice of tokens. A mirror of cpp/step_ops.h."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p


class LogitEdits(ctypes.Structure):
    _fields_ = (
        ("repetition", c_void_p),
        ("presence", c_void_p),
        ("frequency", c_void_p),
        ("bias_count", c_void_p),
        ("bias_ids", c_void_p),
        ("biases", c_void_p),
        ("ban_count", c_void_p),
        ("ban_ids", c_void_p),
        ("min_tokens", c_void_p),
        ("prompt", c_void_p),
        ("token_ids", c_void_p),
        ("most_biases", c_int64),
        ("most_bans", c_int64),
        ("most_tokens", c_int64),
        ("mask_of", c_void_p),
        ("mask_words", c_void_p),
        ("mask_stride", c_int64),
        ("watermark_key", c_uint64),
        ("watermark", c_int32),
        ("green_below", c_uint32),
        ("green_bias", c_float),
    )


class PackedLogprobs(ctypes.Structure):
    _fields_ = (
        ("words", c_void_p),
        ("stride", c_int64),
    )


class SampleOp(ctypes.Structure):
    _fields_ = (
        ("count", c_void_p),
        ("rows", c_void_p),
        ("ahead", c_void_p),
        ("logits", c_void_p),
        ("vocab", c_int64),
        ("targets", c_void_p),
        ("edits", c_void_p),
        ("kind", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("top_n_sigma", c_void_p),
        ("streams", c_void_p),
        ("outputs", c_void_p),
        ("logprobs", c_void_p),
        ("tokens", c_void_p),
        ("status", c_void_p),
        ("packed", c_void_p),
    )


class FillGroup(ctypes.Structure):
    _fields_ = (
        ("batch_tables", c_void_p),
        ("batch_stride", c_int64),
        ("tables", c_void_p),
        ("stride", c_int64),
        ("context_lens", c_void_p),
        ("blocks", c_void_p),
        ("offsets", c_void_p),
    )


class FillOp(ctypes.Structure):
    _fields_ = (
        ("sequences", c_void_p),
        ("units", c_void_p),
        ("units_stride", c_int64),
        ("batch_tokens", c_void_p),
        ("tokens_stride", c_int64),
        ("computed", c_void_p),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("groups", c_void_p),
        ("group_count", c_int64),
        ("block_size", c_int64),
    )


class AdvanceOp(ctypes.Structure):
    _fields_ = (
        ("sequences", c_void_p),
        ("units", c_void_p),
        ("units_stride", c_int64),
        ("tokens", c_void_p),
        ("batch_tokens", c_void_p),
        ("tokens_stride", c_int64),
        ("computed", c_void_p),
        ("outputs", c_void_p),
        ("accepted", c_void_p),
    )
