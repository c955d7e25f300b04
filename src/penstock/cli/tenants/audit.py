"""Implements `penstock audit verify`."""

import sqlite3
from pathlib import Path

from penstock.frontend.tenants.audit_check import check_audit, compare_with_ledger
from penstock.observe.reporting import reporting


def verify(file: str, heads: str | None, key_file: str | None, ledger: str | None) -> int:
    """Prints what the log has, and the first thing that is wrong. Returns the exit status. Raises ValueError."""
    if heads is not None and key_file is None:
        raise ValueError("--heads are signed: also give the secret with --key-file")
    for flag, name in (("FILE", file), ("--heads", heads), ("--key-file", key_file), ("--ledger", ledger)):
        if name is not None and (Path(name).is_dir() or not Path(name).exists()):
            raise ValueError(f"{flag} {name!r} cannot be read: there is no such file; name another one")
    try:
        key = b"" if key_file is None else Path(key_file).read_bytes().strip()
        with reporting("reading the log"):
            report = check_audit(Path(file), None if heads is None else Path(heads), key)
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read: {str(error.strerror).lower()}; name another file") from None
    wrong = report.wrong
    if not wrong and ledger is not None:
        try:
            wrong = compare_with_ledger(report, sqlite3.connect(f"file:{Path(ledger).resolve()}?mode=ro", uri=True))
        except sqlite3.Error as error:
            raise ValueError(f"--ledger {ledger} cannot be read: {error}; name another file") from None
    if wrong:
        print(wrong)
        return 1
    covered = "no heads were given, so a cut tail is not found"
    if heads is not None:
        covered = f"of which signed heads cover {report.signed}"
    lost = f"; {report.lost} could not be written, as the log itself says" if report.lost else ""
    print(f"{file} is intact: {report.records} records, {covered}{lost}")
    return 0
