"""`penstock tenants | ledger | audit | logs`, as users type them."""

import json
import time
from pathlib import Path

import pytest

from penstock.cli.main import app
from penstock.cli.usage import run_app
from penstock.config.tenants.file import read_tenants
from penstock.config.tenants.keys import matches
from penstock.frontend.tenants.audit import AuditLog
from penstock.frontend.tenants.ledger import FILE, Ledger, LedgerRow


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """The exit status and what was printed."""
    try:
        status = run_app(app, [str(each) for each in arguments])
    except SystemExit as ended:
        status = int(ended.code or 0) if not isinstance(ended.code, str) else 1
    return status, capsys.readouterr().out


def test_keys_are_made_rotated_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tenants.yaml"
    _, said = run(capsys, "tenants", "add", file, "search", "--key", "ci", "--wire", "openai", "--expires-in", 30)
    key = said.split("\n")[0]
    assert "shown only now" in said and "penstock reload" in said
    (entry,) = read_tenants(file).tenants["search"].keys
    assert matches(key.encode(), entry.hash) and entry.wires == ("openai",) and entry.expires is not None
    assert key not in file.read_text()
    _, said = run(capsys, "tenants", "rotate", file, "search", "--key", "ci", "--keep-days", 2)
    old, new = read_tenants(file).tenants["search"].keys
    assert matches(said.split("\n")[0].encode(), new.hash) and new.name == "ci" and new.wires == ("openai",)
    assert matches(key.encode(), old.hash) and old.name == f"ci-{entry.id}"
    assert old.expires is not None and old.expires < entry.expires
    _, listed = run(capsys, "tenants", "list", file)
    assert listed.splitlines()[0].split()[:3] == ["TENANT", "WEIGHT", "CLASS"]
    assert len(listed.splitlines()) == 3
    assert run(capsys, "tenants", "check", file) == (0, f"{file} is valid: 1 tenants with 2 keys, 0 of them expired\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("add", "FILE", "a b"), "TENANT is 'a b': give up to 64 letters"),
        (("add", "FILE", "a", "--wire", "soap"), "--wire is 'soap': give one of openai"),
        (("add", "FILE", "search"), "tenant 'search' has a key 'default': give another --key"),
        (("rotate", "FILE", "nobody"), "has no tenant 'nobody': give one of search"),
        (("rotate", "FILE", "search", "--key", "x"), "has no key 'x': give one of these: default"),
        (("list", "missing.yaml"), "cannot be read: no such file"),
    ],
)
def test_wrong_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], error: str) -> None:
    file = tmp_path / "tenants.yaml"
    run(capsys, "tenants", "add", file, "search")
    with pytest.raises(ValueError) as raised:
        run(capsys, "tenants", *(str(file) if each == "FILE" else each for each in arguments))
    assert error in str(raised.value)


def ledger(folder: Path) -> Path:
    book = Ledger(folder / FILE, 400)
    for number in range(30):
        tenant = "search" if number % 3 else "reports"
        book.add(
            LedgerRow(
                id=str(number),
                began=time.time() - 86_400 * (number % 2),
                tenant=tenant,
                key="ci",
                model="m",
                version="v",
                wire="openai",
                prompt=10,
                output=2,
                step_ms=100.0,
                nano=1_000_000,
            )
        )
    book.close()
    return folder / FILE


def test_the_ledger_is_summed_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ledger(tmp_path)
    _, table = run(capsys, "ledger", "summary", "--ledger", path)
    assert [line.split()[:3] for line in table.splitlines()] == [
        ["TENANT", "REQUESTS", "PROMPT"],
        ["reports", "10", "100"],
        ["search", "20", "200"],
    ]
    _, found = run(capsys, "ledger", "summary", "--ledger", tmp_path, "--by", "tenant,day", "--json")
    sums = json.loads(found)
    assert len(sums) == 4 and sum(each["nano"] for each in sums) == 30_000_000
    _, exported = run(capsys, "ledger", "export", "--ledger", path, "--tenant", "reports", "--format", "jsonl")
    assert {json.loads(line)["tenant"] for line in exported.splitlines()} == {"reports"}
    _, exported = run(capsys, "ledger", "export", "--ledger", path)
    assert len(exported.splitlines()) == 31
    for wrong, error in (
        (("summary", "--by", "team"), "there is no 'team'; give names of tenant"),
        (("summary", "--since", "yesterday"), "--since is 'yesterday': give a day"),
        (("export", "--format", "xml"), "--format is 'xml': give csv or jsonl"),
    ):
        with pytest.raises(ValueError, match=error.split(";")[0]):
            run(capsys, "ledger", *wrong, "--ledger", path)
    with pytest.raises(ValueError, match="there is no ledger"):
        run(capsys, "ledger", "summary", "--ledger", tmp_path / "none")


def test_an_audit_log_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("a secret of the operator\n")
    log, heads = tmp_path / "audit.jsonl", tmp_path / "heads.jsonl"
    made = AuditLog(log, heads, b"a secret of the operator", required=False)
    for number in range(5):
        made.add("request", number=number)
    made.close()
    given = ("audit", "verify", log, "--heads", heads, "--key-file", tmp_path / "key")
    assert run(capsys, *given) == (0, f"{log} is intact: 5 records, of which signed heads cover 5\n")
    status, said = run(capsys, "audit", "verify", log)
    assert status == 0 and "a cut tail is not found" in said
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:3]))
    status, said = run(capsys, *given)
    assert status == 1 and "its tail was cut" in said
    with pytest.raises(ValueError, match="--key-file"):
        run(capsys, "audit", "verify", log, "--heads", heads)


def test_slow_and_failed_requests_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = Ledger(tmp_path / FILE, 400)
    for number in range(20):
        book.add(
            LedgerRow(
                id=str(number),
                began=time.time() - 100 + number,
                tenant="a" if number % 2 else "b",
                key="k",
                model="m",
                version="v",
                wire="openai",
                status=500 if number == 3 else 200,
                total_ms=100.0 * number,
            )
        )
    book.close()
    given = ("logs", "--ledger", tmp_path)
    _, found = run(capsys, *given, "--tenant", "a", "--slow", 1.5, "--json")
    assert [json.loads(line)["id"] for line in found.splitlines()] == ["15", "17", "19"]
    _, found = run(capsys, *given, "--last", 2, "--json")
    assert [json.loads(line)["id"] for line in found.splitlines()] == ["18", "19"]
    _, table = run(capsys, *given, "--errors")
    assert len(table.splitlines()) == 2 and "500" in table
    with pytest.raises(ValueError, match="there is no ledger"):
        run(capsys, "logs", "--ledger", tmp_path / "none")
