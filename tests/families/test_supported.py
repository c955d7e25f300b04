"""The table of supported models: it is what the registry has."""

import json

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.cli.models.supported import print_supported
from penstock.families import FAMILIES
from penstock.families.gguf.config import architectures
from penstock.families.registry import ENCODERS
from penstock.families.supported import supported_models

QWEN3_5 = ("ForCausalLM", "ForConditionalGeneration", "MoeForCausalLM", "MoeForConditionalGeneration")


def test_every_architecture_is_in_the_table_and_every_gguf_architecture_too() -> None:
    rows = supported_models()
    assert {row.architecture for row in rows} == FAMILIES.keys() | ENCODERS.keys()
    assert {name for row in rows for name in row.gguf} == set(architectures())


def test_what_a_row_says_follows_from_the_spec() -> None:
    rows = {row.architecture: row for row in supported_models()}
    text = {name: row for name, row in rows.items() if row.gives == "text"}
    qwen = ["Qwen3NextForCausalLM", *(f"Qwen3_5{kind}" for kind in QWEN3_5)]
    stateful = {*qwen, "GraniteMoeHybridForCausalLM", "Mamba2ForCausalLM", "NemotronHForCausalLM"}
    latents = {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"}

    def without(ability: str) -> set[str]:
        return {name for name, row in text.items() if not getattr(row, ability)}

    assert {name for name, row in text.items() if row.states} == stateful
    assert without("prefix_cache") == without("speculation") == stateful
    assert without("gpu") == stateful | latents and without("quantized_kv") == latents | {"Mamba2ForCausalLM"}
    assert {row.quantization for row in text.values()} == {("int8", "int4")}
    normed_whole = {"Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM", "MiniMaxM2ForCausalLM"}
    assert {name for name, row in text.items() if "tensor" not in row.ranks} == stateful | normed_whole
    assert {name for name, row in text.items() if "pipeline" not in row.ranks} == stateful
    assert "expert" in rows["Glm4MoeForCausalLM"].ranks and "expert" not in rows["Glm4ForCausalLM"].ranks


def test_encoders_combine_with_int8_alone() -> None:
    for row in supported_models():
        if row.gives != "text":
            abilities = (row.quantized_kv, row.prefix_cache, row.speculation, row.gpu)
            assert (row.quantization, row.ranks, any(abilities)) == (("int8",), (), False)


def test_what_the_models_are() -> None:
    rows = {row.architecture: row for row in supported_models()}
    assert {name: row.gives for name, row in rows.items() if name.startswith("XLM")} == {
        "XLMRobertaModel": "embeddings",
        "XLMRobertaForMaskedLM": "embeddings",
        "XLMRobertaForSequenceClassification": "scores",
    }
    assert {row.gives for name, row in rows.items() if name in FAMILIES} == {"text"}


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_the_command_prints_every_architecture(form: list[str]) -> None:
    result = CliRunner().invoke(app, ["models", *form])
    assert result.exit_code == 0
    assert all(name in result.output for name in FAMILIES)
    if form == ["--json"]:
        assert len(json.loads(result.output)) == len(FAMILIES) + len(ENCODERS)


def test_a_terminal_of_80_columns_shows_what_a_model_combines_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_supported(as_json=False)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["MODELS", "RANKS", "QUANTISED", "CACHE", "DRAFTS", "GPU"]
    assert max(map(len, lines[: len(supported_models())])) <= 80
    assert next(line for line in lines if line.startswith("Qwen 3 MoE")).split()[3:] == [
        *("TPE", "int8", "int4", "KV", "yes", "yes", "yes")
    ]
    assert next(line for line in lines if line.startswith("Mamba 2")).split()[-6:] == [
        *("-", "int8", "int4", "no", "no", "no")
    ]
