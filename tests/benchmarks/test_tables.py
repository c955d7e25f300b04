"""The tables of benchmarks/README.md."""

import tables


def test_a_case_with_fewer_steps_than_tokens_is_marked() -> None:
    assert tables.drafts("1x256/64", {"steps": 40}) == " †"
    assert tables.drafts("1x256/64", {"steps": 64}) == ""
    assert tables.drafts("1x1024/1", {"steps": 2}) == ""
    assert tables.drafts("8x256/64", None) == ""  # a peer


def test_the_page_has_the_tables_of_the_results() -> None:
    assert tables.tables() in tables.README.read_text()
