"""Implements `penstock models`: the table of supported models."""

import json
from dataclasses import asdict

from penstock.cli.models.table import print_table
from penstock.families.supported import SupportedModel, supported_models
from penstock.families.transformers_model import INSTALL


def print_supported(as_json: bool) -> None:
    """Prints the table: for people, or as JSON."""
    rows = supported_models()
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print_table([_cells(row) for row in rows])
        print("\nRANKS: T tensor, P pipeline, E expert. CACHE: of prefixes. DRAFTS: speculation.")
        print(f"Other decoders of transformers run with its code, which is slower: {INSTALL}")


def _cells(row: SupportedModel) -> dict[str, str]:
    """The columns. Those that show which features work come first: a line of 80 characters has room for them."""
    return {
        "MODELS": row.models,
        "RANKS": "".join(name[0].upper() for name in row.ranks) or "-",
        "QUANTISED": " ".join(_quantised(row)),
        "CACHE": _yes(row.prefix_cache),
        "DRAFTS": _yes(row.speculation),
        "GPU": _yes(row.gpu),
        "GIVES": row.gives,
        "GGUF": ", ".join(row.gguf) or "-",
        "ARCHITECTURE": row.architecture,
    }


def _quantised(row: SupportedModel) -> list[str]:
    return [*row.quantization, *(["KV"] if row.quantized_kv else [])]


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
