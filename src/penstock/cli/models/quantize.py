"""Implements `penstock quantize`: checks the options, makes the windows of tokens, and shows the result."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch

from penstock.bench.quality import Window, cut_windows
from penstock.cli.output import show_table, write_json
from penstock.config import format_bytes
from penstock.families import ModelSpec, load_spec
from penstock.gguf import is_gguf, read_gguf
from penstock.observe.progress import work_progress
from penstock.prepare.files import check_file, check_folder
from penstock.quantize.formats.destination import Destination, FolderDestination, GgufDestination
from penstock.quantize.formats.gguf_mix import MOST
from penstock.quantize.formats.integers import Float8, Integers
from penstock.quantize.formats.target import CannotQuantizeTo, CheckpointTarget, CompressedTensors, GptqCheckpoint
from penstock.quantize.job import CALIBRATED, METHODS, Job, MethodName, matrices_of, run, steps_of
from penstock.quantize.stream import cannot_stream
from penstock.quantize.texts import class_texts
from penstock.quantize.workers import Workers
from penstock.text import Tokenizer
from penstock.weights.checkpoint import check_tensors, stored_tensors
from penstock.weights.files import model_bytes
from penstock.weights.hub import locate_model

WINDOW_TOKENS = 512
CHECKED = 8  # windows of each class of text, on which the result is compared with the original
BITS = {"int8": 8, "int4": 4, "int3": 3}
SCHEMES = ("int8", "int4", "int3", "w8a8", "fp8", *(f"gguf:{name}" for name in MOST))
FORMATS = ("compressed-tensors", "gptq", "gguf")
FORMATS_OF = {"gguf": FORMATS[2:], "int3": FORMATS[1:2], "w8a8": FORMATS[:1], "fp8": FORMATS[:1]}  # the first two else
TABLE = (
    ("text", "class"),
    ("original", "base"),
    ("perplexity", "own"),
    ("change", "change"),
    ("mean KL", "divergence"),
    ("same token", "share"),
)


@dataclass(frozen=True)
class QuantizeOptions:
    """Holds the flags of `penstock quantize`."""

    scheme: str
    group: int | None
    zero_points: bool
    format: str | None
    method: str
    calibration: str
    windows: int
    keep: str | None
    table: bool
    threads: int | None


def quantize(model: str, out: str, options: QuantizeOptions, json_file: str | None) -> None:
    """Makes a quantised checkpoint. Raises ValueError with one line that says what to change."""
    check_file("--json", json_file)
    _check(options, out)
    workers = Workers(options.threads or torch.get_num_threads())
    torch.set_num_threads(1)
    path = locate_model(model, None)
    spec = load_spec(path)
    _check_model(path, spec, options, streamed=options.table or options.method in CALIBRATED)
    destination = _destination(path, spec, options)
    tokenizer = Tokenizer.load(path)
    check = class_windows(tokenizer, window_length(spec), CHECKED) if options.table else {}
    calibration = calibration_windows(tokenizer, spec, options) if options.method in CALIBRATED else []
    settings = {name: value for name, value in asdict(options).items() if name != "threads"}
    job = Job(path, spec, Path(out), cast(MethodName, options.method), calibration, check, settings, workers)
    began = time.monotonic()
    with work_progress(f"quantising {path.stem if is_gguf(path) else path.name}", steps_of(job)) as advance:
        result = run(job, destination, advance)
    _report(job, result, model_bytes(path), destination.size, time.monotonic() - began)
    write_json(json_file, {"model": str(path), "out": out, "options": asdict(options), **result})


def _check(options: QuantizeOptions, out: str) -> None:
    """Raises CannotQuantizeTo for options that are not known or do not fit each other, and for an OUT that is there."""
    kind, _, block_type = options.scheme.partition(":")
    if options.scheme not in SCHEMES:
        raise CannotQuantizeTo(f"--scheme is {options.scheme!r}: use one of {', '.join(SCHEMES)}")
    if options.method not in METHODS:
        raise CannotQuantizeTo(f"--method is {options.method!r}: use one of {', '.join(METHODS)}")
    fits = FORMATS_OF.get(kind, FORMATS[:2])
    if options.format not in (None, *fits):
        raise CannotQuantizeTo(
            f"--format {options.format or repr('')} does not hold --scheme {options.scheme}: use --format {fits[0]}"
        )
    group = options.group
    if group and (group % 16 or not 16 <= group <= 256):
        raise CannotQuantizeTo(
            f"--group is {group}: use 32, 64 or 128 (multiples of 16 up to 256), or 0 for whole rows"
        )
    if kind not in BITS:
        for flag, given in (("--group", group is not None), ("--zero-points", options.zero_points)):
            if given:
                raise CannotQuantizeTo(f"{flag} has no effect with --scheme {options.scheme}: leave it out")
    _check_out(out, block_type)


def _target(options: QuantizeOptions, dtype: torch.dtype) -> CheckpointTarget:
    """Returns the writer of a folder. `dtype` is that of the checkpoint."""
    if options.scheme == "fp8":
        return CompressedTensors(Float8(dtype))
    if options.scheme == "w8a8":
        return CompressedTensors(Integers(8, 0, False, dtype), activations=True)
    bits, group = BITS[options.scheme], 32 if options.group is None else options.group
    if options.scheme == "int3" or options.format == "gptq":
        return GptqCheckpoint(Integers(bits, group, options.zero_points, torch.float16))
    return CompressedTensors(Integers(bits, group, options.zero_points, dtype))


def _check_out(out: str, block_type: str) -> None:
    if not out:
        raise CannotQuantizeTo("OUT is '': it is empty; name a folder, or a file that ends in .gguf")
    path = Path(out)
    if block_type and not is_gguf(path):
        raise CannotQuantizeTo(
            f"OUT is {out!r}, but --scheme gguf:{block_type} makes a file: name one that ends in .gguf"
        )
    if not block_type and path.suffix == ".gguf":
        raise CannotQuantizeTo(f"OUT is {out!r}, but a folder is made: name it otherwise, or use --scheme gguf:Q4_K_M")
    if path.exists():
        raise CannotQuantizeTo(f"OUT {out} is there already: remove it, or name another")
    check_folder("OUT", str(path.absolute().parent))
    path.absolute().parent.mkdir(parents=True, exist_ok=True)


def _check_model(path: Path, spec: ModelSpec, options: QuantizeOptions, *, streamed: bool) -> None:
    made = "a GGUF file" if options.scheme.startswith("gguf:") else "a folder"
    if is_gguf(path) != options.scheme.startswith("gguf:"):
        other = "a folder in safetensors, with --scheme int4" if is_gguf(path) else "a GGUF file of it in F16 or BF16"
        raise CannotQuantizeTo(f"{path.name} cannot become {made} with --scheme {options.scheme}: name {other}")
    if spec.scheme is not None and not is_gguf(path):
        raise CannotQuantizeTo(f"{path.name} is quantised already: name the checkpoint that it was made of")
    reason = cannot_stream(spec)
    if streamed and reason is not None:
        raise CannotQuantizeTo(
            f"the layers of {path.name} cannot be executed one by one, because {reason}: use --method mse --no-table"
        )


def _destination(path: Path, spec: ModelSpec, options: QuantizeOptions) -> Destination:
    """Returns what writes the output. Raises CannotQuantizeTo for a matrix that the format cannot hold, and for a name
    of --keep that fits none."""
    patterns = [each.strip() for each in (options.keep or "").split(",") if each.strip()]
    matrices = matrices_of(spec)
    kept = {name for name in matrices for pattern in patterns if _fits(name, pattern)}
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in matrices):
            raise CannotQuantizeTo(
                f"--keep {pattern} fits no matrix of {path.name}: use names or patterns such as "
                f"{next(iter(matrices)).removesuffix('.weight')} or '*.down_proj'"
            )
    wanted = [name for name in matrices if name not in kept]
    if not wanted:
        why = f"--keep {options.keep} leaves no matrix" if kept else "no matrix is stored as rows"
        raise CannotQuantizeTo(f"{path.name} cannot be quantised: {why}")
    tensors = stored_tensors(path, spec)
    check_tensors(spec, tensors)
    everything = matrices_of(spec, ("matrix", "gated", "router", "vocabulary"))
    if is_gguf(path):
        outer = matrices_of(spec, ("vocabulary",))
        copied = [name for name in tensors if name not in wanted and name not in outer]
        return GgufDestination(read_gguf(path), options.scheme.partition(":")[2], tensors, copied)
    target = _target(options, getattr(torch, spec.checkpoint_dtype))
    ignored = [name.removesuffix(".weight") for name in everything if name not in wanted and "embed" not in name]
    if spec.tie_embeddings:
        ignored.append("lm_head")
    return FolderDestination(path, stored_tensors(path), target, {n: tensors[n].shape for n in wanted}, ignored)


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name.removesuffix(".weight"), pattern) or fnmatchcase(name, pattern)


def window_length(spec: ModelSpec) -> int:
    """Returns the tokens of a window."""
    return min(WINDOW_TOKENS, spec.max_position)


def calibration_windows(tokenizer: Tokenizer, spec: ModelSpec, options: QuantizeOptions) -> list[Window]:
    """Returns the windows of the calibration: of a file, or as many of each class of text."""
    if options.calibration == "builtin":
        each = class_windows(tokenizer, window_length(spec), -(-options.windows // 4), calibration=True).values()
        return [window for windows in zip(*each, strict=False) for window in windows][: options.windows]
    try:
        text = Path(options.calibration).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CannotQuantizeTo(
            f"--calibration {options.calibration} is not a file of UTF-8 text: {error}; name a text file"
        ) from None
    windows = cut_windows(tokenizer, text, window_length(spec), options.windows)
    if not windows:
        raise CannotQuantizeTo(
            f"--calibration {options.calibration} has less than {WINDOW_TOKENS} tokens: name a longer text"
        )
    return windows


def class_windows(
    tokenizer: Tokenizer, length: int, most: int, *, calibration: bool = False
) -> dict[str, list[Window]]:
    """Returns windows of each class of text (see texts.py). Raises ValueError if this Python has no such texts."""
    texts = class_texts(calibration=calibration)
    return {name: cut_windows(tokenizer, text(), length, most) for name, text in texts.items()}


def _report(job: Job, result: Mapping[str, Any], before: int, after: int, seconds: float) -> None:
    counts = Counter(str(choice["method"]) for choice in result["choices"])
    chosen = ", ".join(f"{method} for {count}" for method, count in counts.most_common())
    bits = 8 * after / job.spec.num_parameters()
    print(
        f"{job.out}: {format_bytes(after)}, {bits:.2f} bits a weight; the original has {format_bytes(before)}. Made in "
        f"{seconds:.0f} s by {chosen} of {len(result['choices'])} matrices"
    )
    if result["table"]:
        show_comparison("against the original, weights alone, in fp32", result["table"])


def show_comparison(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the rows of `agreement.by_class`."""
    show_table(title, TABLE, list(_for_people(rows)))


def _for_people(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        margin = "" if row["change_margin"] is None else f" ±{row['change_margin']:.2f}"
        yield {
            "class": row["class"],
            "base": f"{row['base_perplexity']:,.3f}",
            "own": f"{row['perplexity']:,.3f}",
            "change": f"{row['change_percent']:+.2f}%{margin}",
            "divergence": f"{row['kl']:.4f}",
            "share": row["agreement"],
        }
