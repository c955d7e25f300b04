#!/usr/bin/env bash
# Every GPU test and benchmark, in at most 8 minutes, without a network:
#
#     scripts/gpu_check.sh [FILE.json]        figures go to benchmarks/results/gpu.json unless a file is named
#
# Needs an NVIDIA GPU (made for one H100 or H200), Python 3.11 or later with torch 2.11 or later for CUDA, pytest, and what
# pyproject.toml names, but for the server's part. PYTHON names the interpreter. Packages that it lacks (often msgspec,
# pydantic, pydantic-core, annotated-types) are installed from WHEELS, a folder of wheels (default: wheels/ or .whl/ here),
# into a temporary folder. COMMIT names the commit where the tree has no history.
#
# The exit status is 1 where a test fails, 2 where there is no GPU, and 3 where a figure could not be had; those that could
# are written in any case.
set -u
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
out="${1:-benchmarks/results/gpu.json}"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
began=$SECONDS

for folder in "${WHEELS:-}" wheels .whl; do
    if [ -n "$folder" ] && compgen -G "$folder/*.whl" >/dev/null; then
        "$python" -m pip install -q --no-index --no-deps --no-compile --target "$scratch/site" "$folder"/*.whl || exit 3
        export PYTHONPATH="$scratch/site${PYTHONPATH:+:$PYTHONPATH}"
        break
    fi
done
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
if ! "$python" -c 'import sys, torch; print(torch.__version__, end=" "); sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU that this torch can use: the kernels' arithmetic is checked without one by: pytest tests/kernels/triton" >&2
    exit 2
fi
"$python" -c 'import torch; print(torch.cuda.get_device_name(), *torch.cuda.get_device_capability())'

# Kernels against their references, then the fidelity suite; a process to a core, as compiling takes most of the time, with
# a thread each. What compiles for a GPU without one, and what runs the benchmarks at tiny sizes, tells nothing new here.
workers=()
"$python" -c 'import xdist' 2>/dev/null && workers=(-n "$(($(nproc) < 16 ? $(nproc) : 16))")
OMP_NUM_THREADS=1 timeout 140 "$python" -m pytest -q -p no:cacheprovider --continue-on-collection-errors "${workers[@]}" \
    --ignore=tests/kernels/triton/test_hopper.py --ignore=tests/kernels/triton/test_benchmarks.py \
    tests/kernels/triton tests/gpu
tests=$?
echo "tests: exit status $tests after $((SECONDS - began)) s"

left=$((475 - (SECONDS - began)))
"$python" benchmarks/gpu.py --json "$out" --seconds "$left" >/dev/null
benchmarks=$?
echo "benchmarks: exit status $benchmarks after $((SECONDS - began)) s; figures in $out"
[ "$tests" -eq 0 ] || exit 1
[ "$benchmarks" -eq 0 ] || exit 3
