"""Benchmarks measure a model without drafts unless they are asked for."""

from penstock.cli.bench.sizes import BenchSizes, prepare_sized
from penstock.weights.packaged import embedded_model

SIZES = BenchSizes("--cases 1x32/8", 40, 4)


def speculation_with(flags: dict[str, str]) -> str:
    return prepare_sized(str(embedded_model()), flags, SIZES).resolved.engine.speculation


def test_speculation_is_off_unless_it_is_asked_for() -> None:
    assert speculation_with({}) == "off"
    assert speculation_with({"speculation": "suffix"}) == "suffix"
    assert speculation_with({"speculation": "auto"}) == "suffix"
