"""The tenants file: its mistakes have clear errors, and keys are written into it without changing the rest."""

import datetime
from pathlib import Path

import pytest

from penstock.config.tenants.entries import KeyEntry
from penstock.config.tenants.file import add_key, parse_tenants, read_tenants
from penstock.config.tenants.keys import key_id, matches, new_key

PATH = Path("tenants.yaml")
ALL = """
# Teams that share the server.
tenants:
  search:  # the web site
    weight: 3
    class: interactive
    limits: {requests_per_minute: 600, tokens_per_minute: 100000, concurrent_requests: 32}
  reports: {class: batch, group: team}
  team:
    group: team
    kv_share: 0.5

anonymous:
  limits:
    tokens_per_day: 1000

classes:
  interactive: {rank: 0, reserved: 4}
  batch: {rank: 1, step_tokens: 128, max_wait: 60}
  standard: {rank: 1}

fairness: {output_price: 3, quantum: 500}
currency: EUR
prices:
  - {since: 2026-01-01, input: 0.5, output: 1.5, cached: 0.1}
  - {since: 2026-07-01, input: 0.4, output: 1.2}
"""


def test_a_whole_file() -> None:
    file = parse_tenants(ALL, PATH)
    assert list(file.everyone) == ["search", "reports", "team", "anonymous"]
    share = file.share(file.tenants["reports"])
    assert (share.rank, share.held_back, share.step_tokens, share.max_wait, share.output_price) == (1, 4, 128, 60, 3)
    assert file.share(file.tenants["search"]).held_back == 0
    assert file.share(file.tenants["search"], batch=True).rank == 1
    prices = {day: file.price(datetime.date(*day)) for day in ((2025, 1, 1), (2026, 2, 1), (2026, 7, 1))}
    assert [price and price.input for price in prices.values()] == [None, 0.5, 0.4]
    price = prices[2026, 2, 1]
    assert price is not None and price.cost(2_000_000, 1_000_000, 1_000_000) == pytest.approx(1.0 + 0.1 + 1.5)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("tenants: [", "tenants.yaml, line 1: not valid YAML"),
        ("- a", "expected object, got array"),
        ("tenant: {}", "there is no field 'tenant'; correct or remove it"),
        ("tenants: {a: {wieght: 2}}", "at tenants.a: there is no field 'wieght'"),
        ("tenants: {b: {}, a: {weight: yes}}", "at tenants.a.weight: expected float, got bool"),
        ("tenants: {a: {weight: 0}}", "at tenants.a.weight: it is 0; give a number above 0"),
        ("tenants: {a: {kv_share: 2}}", "at tenants.a.kv_share: it is 2; give a number above 0, up to 1"),
        ("tenants: {a: {regions: ['']}}", "at tenants.a.regions: '' is no name: give up to 64 letters"),
        ("tenants: {a: {class: fast}}", "there is no class 'fast'; give one of batch, standard"),
        ("tenants: {a: {limits: {tokens_per_day: -1}}}", "at tenants.a.limits.tokens_per_day: it is -1"),
        ("tenants: {'a b': {}}", "at tenants.a b: a name has up to 64 letters"),
        ("tenants: {anonymous: {}}", "is not 'anonymous'"),
        ("tenants: {a: {keys: [{name: k, id: x, hash: y}]}}", "key 'k' has no valid id and hash"),
        ("batch_class: nightly", "there is no class 'nightly'; add it to classes"),
        ("classes: {a: {rank: -1}}", "at classes.a.rank: it is -1"),
        ("prices: [{since: 2026-01-01, input: -1, output: 1}]", "at prices[0]: a price is below 0"),
        (
            "prices: [{since: soon, input: 1, output: 1}]",
            "at prices[0].since: it is no day; give one such as 2026-11-01",
        ),
        ("watts: -1", "at watts: it is -1; give a number from 0 to 1000000"),
        ("watts: .nan", "at watts: it is nan"),
        ("a: " * 100_000, "not valid YAML"),
    ],
)
def test_a_mistake_names_its_place(text: str, error: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_tenants(text, PATH)
    assert error in str(raised.value)
    assert str(raised.value).startswith("--tenants tenants.yaml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: no such file"):
        read_tenants(tmp_path / "none")
    (tmp_path / "large").write_bytes(b"#" * (5 << 20))
    with pytest.raises(ValueError, match="has more than"):
        read_tenants(tmp_path / "large")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8"):
        read_tenants(tmp_path / "binary")


def made(name: str = "default", **fields: object) -> KeyEntry:
    _, id, stored = new_key()
    return KeyEntry(name=name, id=id, hash=stored, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        ALL,
        "",
        "currency: EUR",
        "tenants:\n  search:\n    weight: 2\n",
        "tenants:\n  search:\n    weight: 2  # more\n\n# the end\n",
        "tenants: {search: {weight: 2}, reports: {}, team: {}}",
        "tenants: {}\ncurrency: EUR\n",
        "tenants:\n  search:\n    keys: []\n    weight: 2\n",
        "tenants:\n    team: {}\n    reports: {}\n",
    ],
)
def test_keys_are_added_and_replaced_and_nothing_else_changes(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    before = read_tenants(path)
    keys = {
        tenant: [made(), made("ci", models=("large",), admin=True, expires=datetime.date(2027, 1, 2))]
        for tenant in ("search", "reports", "new")
    }
    for tenant, given in keys.items():
        for key in given:
            add_key(path, tenant, key)
    first, second = keys["search"]
    new = made()
    renamed = KeyEntry(name="old", id=first.id, hash=first.hash, expires=datetime.date(2026, 12, 1))
    add_key(path, "search", new, replaced=renamed)
    assert read_tenants(path).tenants["search"].keys == (renamed, second, new)
    after = path.read_text()
    assert all(comment in after for comment in ("# Teams", "# the web site", "# more", "# the end") if comment in text)
    assert read_tenants(path).prices == before.prices
    assert read_tenants(path).tenants["new"].keys == tuple(keys["new"])


def test_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    add_key(path, "a", made())
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(list(tmp_path.iterdir())) == 1


def test_only_the_key_matches_its_hash() -> None:
    key, id, stored = new_key()
    assert key_id(key.encode()) == id
    assert key.split("-", 2)[2] not in stored
    assert matches(key.encode(), stored)
    other, _, _ = new_key()
    wrong = [other, f"psk-{id}-{other.split('-', 2)[2]}", key[:-1], key + "x", "", "psk-"]
    assert not any(matches(each.encode(), stored) for each in wrong)
    _, _, again = new_key()
    assert stored.split(":")[1] != again.split(":")[1], "each has a salt of its own"
