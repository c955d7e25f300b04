"""docs/openai.md has the table of sampling parameters, as penstock.declared has it."""

from pathlib import Path

from penstock.declared.sampling import SAMPLING
from penstock.messages import NEUTRAL, GivenSampling, SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "openai.md"


def test_the_page_has_every_parameter_with_its_range() -> None:
    rows = []
    for name, parameter in SAMPLING.items():
        off = f"; {parameter.off:g} is off, too" if parameter.off is not None else ""
        rows.append(f"| `{name}` | {parameter.limit}{off} | {parameter.help} |")
    section = PAGE.read_text().partition("\n## Sampling\n")[2].partition("\n## ")[0]
    found = [line for line in section.splitlines() if line.startswith("| `")]
    assert found == rows, "docs/openai.md needs these rows:\n" + "\n".join(rows)


def test_what_requests_give_is_what_the_engine_takes() -> None:
    """Each parameter has its type in both structs, and a default of the engine's that its range allows."""
    assert list(GivenSampling.__annotations__) == list(SAMPLING) == list(NEUTRAL)
    for name, annotation in GivenSampling.__annotations__.items():
        kind = int if SAMPLING[name].whole else float
        assert SamplingParams.__annotations__[name] is kind and annotation.__origin__ == kind | None
        assert SAMPLING[name].allows(NEUTRAL[name])
