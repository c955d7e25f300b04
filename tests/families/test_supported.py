"""The table of supported models: it is what the registry has, and the page of the documentation is it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.cli.models.supported import page
from penstock.families import FAMILIES
from penstock.families.gguf.config import architectures
from penstock.families.registry import ENCODERS
from penstock.families.supported import supported_models

QWEN3_5 = ("ForCausalLM", "ForConditionalGeneration", "MoeForCausalLM", "MoeForConditionalGeneration")
PAGE = Path(__file__).parents[2] / "docs" / "supported-models.md"


def test_the_page_is_what_the_registry_says() -> None:
    """If this fails: penstock models --markdown > docs/supported-models.md"""
    assert PAGE.read_text() == page(supported_models())


def test_every_architecture_is_in_the_table_and_every_gguf_architecture_too() -> None:
    rows = supported_models()
    assert {row.architecture for row in rows} == FAMILIES.keys() | ENCODERS.keys()
    assert {name for row in rows for name in row.gguf} == set(architectures())


def test_what_a_row_says_follows_from_the_spec() -> None:
    rows = {row.architecture: row for row in supported_models()}
    undivided = [name for name, row in rows.items() if not row.tensor_ranks and row.gives == "text"]
    stateful = [name for name, row in rows.items() if row.states]
    qwen = ["Qwen3NextForCausalLM", *(f"Qwen3_5{kind}" for kind in QWEN3_5)]
    assert stateful == [*qwen, "GraniteMoeHybridForCausalLM", "Mamba2ForCausalLM", "NemotronHForCausalLM"]
    assert {*undivided} == {*stateful, "Olmo2ForCausalLM", "Olmo3ForCausalLM"}
    assert not any(rows[name].expert_ranks or rows[name].flashinfer for name in stateful)
    assert rows["Glm4MoeForCausalLM"].expert_ranks and not rows["Glm4ForCausalLM"].expert_ranks
    assert not rows["Gemma2ForCausalLM"].flashinfer and rows["Gemma3ForCausalLM"].flashinfer
    assert not rows["GptOssForCausalLM"].flashinfer
    assert {name: row.gives for name, row in rows.items() if name.startswith("XLM")} == {
        "XLMRobertaModel": "embeddings",
        "XLMRobertaForMaskedLM": "embeddings",
        "XLMRobertaForSequenceClassification": "scores",
    }
    assert {row.gives for name, row in rows.items() if name in FAMILIES} == {"text"}


@pytest.mark.parametrize("form", [[], ["--json"], ["--markdown"]])
def test_the_command_prints_every_architecture(form: list[str]) -> None:
    result = CliRunner().invoke(app, ["models", *form])
    assert result.exit_code == 0
    assert all(name in result.output for name in FAMILIES)
    if form == ["--json"]:
        assert len(json.loads(result.output)) == len(FAMILIES) + len(ENCODERS)
