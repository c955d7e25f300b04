"""The kernels for instruction sets that this processor lacks, built against emulated instructions (see emulation/)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernels.native.build import AVX2, AVX512, compiler
from penstock.kernels.native.loader import instruction_sets, processor_sets
from tests.kernels.native.conftest import EMULATION, of_instruction_set

HERE = Path(__file__).parent
TESTS = (
    "../test_ops.py",
    "test_linear_schemes.py",
    "test_grouped_arithmetic.py",
    "../test_moe.py",
    "test_attention_rows.py",
    "test_exact.py",
    "test_int8_pages.py",
    "../../runtime/sampling/test_native_sampler.py",
)
# Which of these tests, by parts of their names. AMX and BF16 leave fp32, and so the sampler's logits, to AVX512; AMX
# leaves it all ops but products, experts and attention.
CHOSEN = {
    "amx": "((native and bfloat16 and (linear or logits or experts or attention)) or schemes or grouped or rows)"
    " and not (native_sampler or latent)",
    "avx512_bf16": "((native and bfloat16) or schemes or rows) and not native_sampler",
    "avx512": "(native or schemes or grouped or rows or int8_pages) and not avx2",
}

EVERY_SET = (*AVX512, *(f"-m{part}" for part in ("avx512bf16", "avx512fp16", "amx-tile", "amx-bf16", "amx-int8")))


@pytest.mark.skipif("amx" not in processor_sets(), reason="this processor lacks instructions that are emulated")
def test_emulated_instructions_have_the_results_of_the_processor(tmp_path: Path) -> None:
    printed = []
    for flags in (EVERY_SET, (*AVX2, f"-I{EMULATION}", "-Wno-psabi")):
        program = tmp_path / f"program{len(printed)}"
        source = str(HERE / "instructions_test.cpp")
        subprocess.run([*compiler(), "-std=c++20", "-O1", *flags, source, "-o", str(program)], check=True)
        printed.append(subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines())
    assert len(printed[0]) > 80
    assert printed[0] == printed[1]


@pytest.mark.long
@pytest.mark.parametrize("isa", ["amx", "avx512", pytest.param("avx512_bf16", marks=pytest.mark.rare)])
def test_kernels(isa: str, request: pytest.FixtureRequest) -> None:
    if isa in instruction_sets():
        pytest.skip(f"this processor has {isa}: these tests run on it without emulation")
    environment = {**os.environ, **of_instruction_set(isa, request.config)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN[isa]]
    tests = [str(HERE / name) for name in TESTS]
    done = subprocess.run([*command, *tests], env=environment, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[2])
    assert done.returncode == 0, done.stdout
