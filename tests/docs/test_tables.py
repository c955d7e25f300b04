"""The tables of the documentation that are made from code."""

from scripts.document_tables import pages

from penstock.declared.sampling import SAMPLING
from penstock.messages import NEUTRAL, GivenSampling, SamplingParams, check_sampling


def test_the_pages_have_the_tables() -> None:
    for path, text in pages().items():
        assert path.read_text() == text, f"run python scripts/document_tables.py, which writes {path.name}"


def test_what_requests_give_is_what_the_engine_takes() -> None:
    """Each parameter has its type in both structs, and a default of the engine's that its range allows."""
    assert list(GivenSampling.__annotations__) == list(SAMPLING) == list(NEUTRAL)
    for name, annotation in GivenSampling.__annotations__.items():
        kind = int if SAMPLING[name].whole else float
        assert SamplingParams.__annotations__[name] is kind and annotation.__origin__ == kind | None
    check_sampling(SamplingParams(seed=0, max_tokens=1, **NEUTRAL), vocab_size=10, max_logprobs=0)
