"""Files that the parser refuses: what each is made of, for raw_file, and a pattern of the error."""

import struct
from typing import Any

from penstock.gguf import TYPES
from tests.gguf.raw import NUMBER, raw_key, raw_string, raw_tensor

F32, Q4_0 = TYPES["F32"].number, TYPES["Q4_0"].number
HUGE = 2**63

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another format": ({"magic": b"GGML"}, r"not a GGUF file: it begins with b'GGML'"),
    "version 1": ({"version": 1}, r"GGUF version 1 is not supported; supported: 2 and 3"),
    "version 4": ({"version": 4}, r"GGUF version 4 is not supported"),
    "big-endian": ({"version": 3 << 24}, r"big-endian, which is not supported"),
    "many keys": ({"key_count": HUGE}, r"9223372036854775808 metadata keys, more than the 65536 allowed"),
    "many tensors": ({"tensor_count": HUGE}, r"9223372036854775808 tensors, more than the 131072 allowed"),
    "more keys than bytes": ({"key_count": 60_000}, r"truncated: \d+ bytes cannot hold 60000 metadata keys"),
    "a missing key": (
        {"key_count": 2, "keys": [raw_key("a", 0, b"\1")], "data": bytes(8)},
        r"a metadata key at byte \d+ has 0 bytes",
    ),
    "a key twice": ({"keys": [raw_key("a", 0, b"\1")] * 2}, r"metadata key 'a' appears twice"),
    "a long key": ({"keys": [raw_key("a" * 2000, 0, b"\1")]}, r"has 2000 bytes; expected 1 to 1024"),
    "a key of bytes": ({"keys": [raw_key(b"\xff", 0, b"\1")]}, r"a metadata key, b'\\xff', is not UTF-8"),
    "an unknown type": ({"keys": [raw_key("a", 13, b"\1")]}, r"metadata 'a' has the unknown value type 13"),
    "a bool of 2": ({"keys": [raw_key("a", 7, b"\2")]}, r"metadata 'a' is 2; a bool is 0 or 1"),
    "a string of bytes": ({"keys": [raw_key("a", 8, raw_string(b"ab\xff"))]}, r"metadata 'a' is not UTF-8 at byte \d+"),
    "a string too long": (
        {"keys": [raw_key("a", 8, struct.pack("<Q", HUGE))]},
        r"truncated: metadata 'a', with a string of 9223372036854775808 bytes",
    ),
    "an array too long": (
        {"keys": [raw_key("a", 9, struct.pack("<IQ", 0, HUGE))]},
        r"truncated: metadata 'a', an array of 9223372036854775808 values",
    ),
    "an array of an unknown type": (
        {"keys": [raw_key("a", 9, struct.pack("<IQ", 77, 1))]},
        r"metadata 'a' has the unknown value type 77",
    ),
    "deep arrays": (
        {"keys": [raw_key("a", 9, struct.pack("<IQ", 9, 1) * 6 + struct.pack("<IQ", 0, 0))]},
        r"metadata 'a' has arrays nested deeper than 4",
    ),
    "an alignment of 3": (
        {"keys": [raw_key("general.alignment", 4, NUMBER.pack(3))]},
        r"general.alignment is 3; expected a power of two",
    ),
    "an alignment of 0": ({"keys": [raw_key("general.alignment", 4, NUMBER.pack(0))]}, r"general.alignment is 0"),
    "an alignment of text": (
        {"keys": [raw_key("general.alignment", 8, raw_string("32"))]},
        r"general.alignment is '32'",
    ),
    "no dimensions": ({"tensors": [raw_tensor("t", [], F32, 0)]}, r"tensor 't' has 0 dimensions; expected 1 to 4"),
    "five dimensions": ({"tensors": [raw_tensor("t", [1] * 5, F32, 0)]}, r"tensor 't' has 5 dimensions"),
    "an empty tensor": ({"tensors": [raw_tensor("t", [4, 0], F32, 0)]}, r"tensor 't' is empty: shape \[0, 4\]"),
    "a huge tensor": (
        {"tensors": [raw_tensor("t", [HUGE, HUGE, HUGE, HUGE], F32, 0)], "data": bytes(64)},
        r"tensor 't', F32 \[9223.*ends at byte \d+ of \d+",
    ),
    "a wide tensor": (
        {"tensors": [raw_tensor("t", [17], F32, 0)], "data": bytes(64)},
        r"truncated, or a wrong header: tensor 't', F32 \[17\], ends at byte \d+",
    ),
    "a far offset": (
        {"tensors": [raw_tensor("t", [1], F32, HUGE)], "data": bytes(64)},
        r"tensor 't'.*ends at byte 92233720",
    ),
    "an offset of 4": (
        {"tensors": [raw_tensor("t", [1], F32, 4)], "data": bytes(64)},
        r"tensor 't' is at offset 4, which is not a multiple of the alignment 32",
    ),
    "an unknown tensor type": (
        {"tensors": [raw_tensor("t", [1], 99, 0)], "data": bytes(64)},
        r"tensor 't' has type 99, which is not supported; supported: F32, .*MXFP4",
    ),
    "another tensor type": (
        {"tensors": [raw_tensor("t", [256], 16, 0)], "data": bytes(64)},
        r"tensor 't' has type 16 \(IQ2_XXS\), which is not supported",
    ),
    "rows of half a block": (
        {"tensors": [raw_tensor("t", [48, 2], Q4_0, 0)], "data": bytes(64)},
        r"tensor 't' has rows of 48 values; Q4_0 needs a multiple of 32",
    ),
    "a tensor twice": (
        {"tensors": [raw_tensor("t", [1], F32, 0), raw_tensor("t", [1], F32, 32)], "data": bytes(64)},
        r"tensor 't' appears twice",
    ),
    "an overlap": (
        {"tensors": [raw_tensor("t", [9], F32, 0), raw_tensor("u", [1], F32, 32)], "data": bytes(64)},
        r"tensor 'u' at byte \d+ overlaps 't', which ends at byte \d+",
    ),
    "a name of lines": ({"tensors": [raw_tensor("t\n" * 100, [0], F32, 0)]}, r"tensor 't\\nt\\n"),
}
