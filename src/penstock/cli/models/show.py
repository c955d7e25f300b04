"""Implements `penstock show`."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.cli.models.facts import LocalModelFacts, TypeRow
from penstock.cli.models.table import count_text, print_table, printable
from penstock.config import format_bytes
from penstock.config.weights import WeightFormat
from penstock.families import ModelSpec, UnsupportedModel, load_generation_defaults, load_spec
from penstock.text import TokenizerError, chat_template_sources
from penstock.weights.hub import locate_model
from penstock.weights.local_models import local_models
from penstock.weights.manifest import NAME, read_manifest
from penstock.weights.packaged import locate_default, packaged_model

MAX_CARD_CHARACTERS = 1 << 16
_LICENCE = re.compile(r"^license(?:_name)?: *[\"']?([\w.+ -]+)", re.MULTILINE)


def show(model: str | None, revision: str | None, template: bool, as_json: bool) -> None:
    """Prints the facts of a model on this machine, or only its chat template. Reads no weights."""
    path = locate_default() if model is None else locate_model(model, revision, network=False)
    if template:
        _print_template(path)
        return
    facts = LocalModelFacts(path)
    names = {one.path: one.name for one in local_models()}
    figures = _figures(names.get(path, model or path.name), facts)
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        _print(figures)


def _print_template(path: Path) -> None:
    sources = chat_template_sources(path)
    if not sources:
        raise ValueError(f"{path} has no chat template; it completes texts")
    default = sources.get("default") or next(iter(sources.values()))
    print(printable(default) if sys.stdout.isatty() else default)
    if others := [name for name in sources if sources[name] != default]:
        print(f"other templates of this model: {', '.join(others)}; --json has them", file=sys.stderr)


def _figures(name: str, facts: LocalModelFacts) -> dict[str, Any]:
    packaged = packaged_model(facts.path)
    spec, problem = _spec(facts.path)
    return {
        "name": name,
        "path": str(facts.path),
        "problem": problem,
        "format": facts.format,
        "size": facts.size,
        "architecture": facts.architecture,
        "layers": len(spec.layers) if spec else None,
        "vocabulary": spec.vocabulary if spec else None,
        "parameters": facts.parameters,
        "context": facts.context,
        "licence": packaged.licence if packaged else _licence(facts),
        "checked_files": _checked_files(facts.path),
        "sampling": {**(packaged.generation if packaged else {}), **load_generation_defaults(facts.path)},
        "chat_templates": _templates(facts.path),
        "types": [_type(row, facts.formats.get(row.type)) for row in facts.types],
    }


def _spec(path: Path) -> tuple[ModelSpec | None, str | None]:
    """The spec, or why the model cannot be served."""
    try:
        return load_spec(path), None
    except UnsupportedModel as error:
        return None, str(error)


def _checked_files(path: Path) -> int | None:
    """How many files each start compares with the model's manifest; None without a manifest."""
    try:
        sums = read_manifest(path)
    except ValueError:  # of files that cannot be served, as "problem" says
        return None
    return None if sums is None else len(sums)


def _templates(path: Path) -> dict[str, str]:
    try:
        return chat_template_sources(path)
    except TokenizerError:  # the model has no tokenizer that is read; serve says so
        return {}


def _licence(facts: LocalModelFacts) -> str | None:
    """The licence that the metadata or the model card names, or the file that has it."""
    if facts.gguf is not None:
        named = facts.gguf.metadata.get("general.license")
        if isinstance(named, str):
            return named
    folder = facts.path if facts.path.is_dir() else facts.path.parent
    try:
        with (folder / "README.md").open(encoding="utf-8", errors="replace") as file:
            card = file.read(MAX_CARD_CHARACTERS)
    except OSError:
        card = ""
    begin, _, rest = card.partition("---\n")
    match = None if begin.strip() else _LICENCE.search(rest.partition("\n---")[0])
    if match is None:
        return "see LICENSE" if (folder / "LICENSE").is_file() else None
    return match[1].strip()


def _type(row: TypeRow, kept: WeightFormat | None) -> dict[str, Any]:
    return {
        "type": row.type,
        "tensors": row.tensors,
        "weights": row.weights,
        "size": row.bytes,
        "bits_per_weight": row.bits,
        "bits_per_weight_in_memory": kept.bits_per_weight if kept else None,
    }


def _print(figures: Mapping[str, Any]) -> None:
    templates = figures["chat_templates"]
    characters = sum(map(len, templates.values()))
    sampling = ", ".join(f"{name} {value:g}" for name, value in figures["sampling"].items())
    checked = figures["checked_files"]
    layers = f", {figures['layers']} layers" if figures["layers"] else ""
    lines = {
        "path": figures["path"],
        "not usable": figures["problem"],
        "format": f"{figures['format']}, {format_bytes(figures['size'])}",
        "architecture": f"{figures['architecture']}{layers}",
        "parameters": count_text(figures["parameters"]),
        "context": figures["context"] and f"{figures['context']:,} tokens",
        "vocabulary": figures["vocabulary"] and f"{figures['vocabulary']:,} tokens",
        "licence": figures["licence"] or "not named in its files",
        "checksums": f"{checked} files are checked at every start ({NAME})" if checked else "none (penstock manifest)",
        "sampling": sampling or "no values recommended",
        "chat template": f"{characters:,} characters; --template prints it" if templates else "none: completes texts",
    }
    print(figures["name"])
    for name, value in lines.items():
        if value:
            print(f"  {name:<14}{printable(value)}")
    print()
    print_table([_cells(row) for row in figures["types"]])


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    kept = row["bits_per_weight_in_memory"]
    return {
        "TYPE": row["type"],
        "TENSORS": f"{row['tensors']:,}",
        "WEIGHTS": f"{row['weights']:,}",
        "SIZE": format_bytes(row["size"]),
        "BITS PER WEIGHT": f"{row['bits_per_weight']:.4g}",
        "IN A CPU'S MEMORY": f"{kept:.4g}" if kept else "by --dtype and --quantization",
    }
