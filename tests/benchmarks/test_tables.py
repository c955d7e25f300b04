"""The tables of benchmarks/README.md."""

import tables


def test_a_case_with_fewer_steps_than_tokens_is_marked() -> None:
    assert tables.drafts("1x256/64", {"steps": 40}) == " †"
    assert tables.drafts("1x256/64", {"steps": 64}) == ""
    assert tables.drafts("1x1024/1", {"steps": 2}) == ""
    assert tables.drafts("8x256/64", None) == ""  # a peer


def test_a_figure_of_a_disturbed_processor_is_marked() -> None:
    figures = {"commit": "abc", "hardware": {}, "tok_s": {"bf16": {"1x8/8": 5.0, "8x8/8": 20.0}}}
    figures |= {"over_best_peer": {}, "last_run": {}, "calm": {"bf16": {"1x8/8": False, "8x8/8": True}}}
    assert "| 5.0 § | 20.0 |" in tables.table(("1x8/8", "8x8/8"), [("compare.json", figures)])


def test_the_page_has_the_tables_of_the_results() -> None:
    assert tables.tables() in tables.README.read_text()
