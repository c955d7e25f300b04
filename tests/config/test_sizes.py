import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1048576", 1 << 20),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("500MB", 500_000_000),
        ("1.5G", 1_500_000_000),
        ("2Ki", 2048),
        ("1TiB", 1 << 40),
        ("7b", 7),
    ],
)
def test_amounts_of_memory(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 XiB", "4GiBs", "1e9", "4,5G", "i", "4i", "0x10", "nan"])
def test_what_is_not_an_amount(text: str) -> None:
    with pytest.raises(ValueError, match="is not an amount of memory; write for example 4GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1 MiB"), (1610612736, "1.50 GiB"), (-(1 << 20), "-1 MiB")],
)
def test_what_people_read(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(1 << 30, 1 << 50))
def test_what_people_read_is_near_what_it_is(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, abs=(1 << 30) / 100)
