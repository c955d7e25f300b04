#!/usr/bin/env bash
# Runs every GPU test and benchmark in at most 8 minutes, without a network:
#
#     scripts/gpu_check.sh [FILE.json]        writes the figures to FILE.json; default: benchmarks/results/gpu.json
#
# It needs an NVIDIA GPU (it is made for one H100 or H200), Python 3.11 or later with torch 2.11 or later for CUDA, pytest,
# and the dependencies in pyproject.toml except the server's.
#
# PYTHON    the interpreter
# WHEELS    a folder of wheels (default: wheels/ or .whl/ here): missing packages (often msgspec, pydantic, pydantic-core,
#           annotated-types) are installed from it into a temporary folder
# COMMIT    the commit to record if the tree has no git history
#
# Exit status: 1 if a test fails, 2 if there is no GPU, 3 if a figure is missing. The other figures are written anyway.
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
    echo "no GPU that this torch can use. To check the kernels' arithmetic without a GPU: pytest tests/kernels/triton" >&2
    exit 2
fi
"$python" -c 'import torch; print(torch.cuda.get_device_name(), *torch.cuda.get_device_capability())'

# Kernels against their references, then the fidelity suite: one process with one thread for each core, as compiling takes
# most of the time. Left out: the test that compiles without a GPU, and the one that runs the benchmarks at tiny sizes.
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
