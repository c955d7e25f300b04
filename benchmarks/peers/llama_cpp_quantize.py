"""Makes other types of a GGUF file with llama.cpp: Q8_0, Q4_0, Q4_1, Q4_K_M and so on.

    python llama_cpp_quantize.py MODEL.gguf OUT_DIR --types Q8_0,Q4_0 [--threads 2] [--imatrix IMATRIX.json]

Writes OUT_DIR/MODEL.TYPE.gguf and prints the path of each. Needs llama-cpp-python. A file that is quantised already is
quantised again, which costs quality: compare such files only with each other.
"""

import argparse
import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp

ERROR = 4  # llama.cpp's level of a message


@llama_cpp.llama_log_callback
def print_errors(level: int, text: bytes, user_data: object) -> None:
    """Drops llama.cpp's messages that are not errors."""
    if level == ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def file_type(name: str) -> int:
    """llama.cpp's number of a file type such as "Q4_K_M". Raises ValueError if there is none."""
    for prefix in ("LLAMA_FTYPE_MOSTLY_", "LLAMA_FTYPE_ALL_"):
        number = getattr(llama_cpp, prefix + name, None)
        if number is not None:
            return int(number)
    known = ", ".join(sorted(x.removeprefix("LLAMA_FTYPE_MOSTLY_") for x in dir(llama_cpp) if "FTYPE_MOSTLY" in x))
    raise ValueError(f"--types: llama.cpp has no type {name}; it has {known}")


def base_name(model: Path) -> str:
    """The name of a file without its type: "qwen3-0.6b" for qwen3-0.6b.BF16.gguf."""
    name, _, last = model.stem.rpartition(".")
    try:
        file_type(last)
    except ValueError:
        return model.stem
    return name or last


def importance(path: Path | None) -> Any:
    """The importance matrix in a file, {tensor: mean square of each of its input's columns}, as llama.cpp takes it."""
    if path is None:
        return None
    rows = json.loads(path.read_text())
    entries = [
        llama_cpp.llama_model_imatrix_data(name.encode(), (ctypes.c_float * len(row))(*row), len(row))
        for name, row in rows.items()
    ]
    return (llama_cpp.llama_model_imatrix_data * (len(entries) + 1))(*entries, llama_cpp.llama_model_imatrix_data())


def quantize(source: Path, target: Path, type_name: str, threads: int, imatrix: Any = None) -> None:
    """Writes `target` as `source` in another type. Raises ValueError if llama.cpp refuses."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = file_type(type_name), threads, True
    if imatrix is not None:
        params.imatrix = imatrix
    partial = target.with_suffix(".partial")
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(params))
    if status != 0:
        partial.unlink(missing_ok=True)
        raise ValueError(f"llama.cpp cannot write {target} from {source}: its messages above have the reason")
    partial.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--types", default="Q8_0,Q4_0,Q4_K_M")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--imatrix", type=Path, help="importance of columns by tensor, as JSON")
    args = parser.parse_args()
    llama_cpp.llama_log_set(print_errors, None)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        for name in args.types.split(","):
            target = args.out / f"{base_name(args.model)}.{name}.gguf"
            if not target.exists():
                quantize(args.model, target, name, args.threads, importance(args.imatrix))
            print(target, flush=True)
    except ValueError as error:
        sys.exit(f"llama_cpp_quantize.py: {error}")


if __name__ == "__main__":
    main()
