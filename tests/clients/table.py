"""The table of docs/tested-clients.md: a row for each client of matrix.py with the result of its last run."""

from pathlib import Path
from typing import NamedTuple

from tests.clients.matrix import CLIENTS, Client

PAGE = Path(__file__).parents[2] / "docs" / "tested-clients.md"
_BEGIN, _END = "<!-- made by tests/clients/table.py -->\n", "<!-- end -->\n"
_COLUMNS = ("client", "version", "what runs", "on", "result", "behind a gateway", "Penstock", "date")
_HEAD = f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|\n"
_PASSED, _FAILED = "passed", "failed"


class Result(NamedTuple):
    """What came of a run."""

    passed: bool
    behind: bool  # it passed behind a gateway, too, or does not run there
    runtime: str  # such as "Python 3.11.7"
    penstock: str  # its version
    date: str  # such as 2026-11-25


def read(page: Path) -> dict[Client, Result]:
    """The results in a page. A client whose row has another version, or says that something else ran, has none."""
    rows = {}
    for line in _parts(page)[1].splitlines()[2:]:
        first, rest = line.removesuffix(" |").split(" | ")[:3], line[2:-2].split(" | ")[3:]
        runtime, result, behind, version, date = rest
        rows[" | ".join(first)] = Result(result == _PASSED, behind != _FAILED, runtime, version, date)
    return {client: rows[_name(client)] for client in CLIENTS if _name(client) in rows}


def write(page: Path, results: dict[Client, Result]) -> None:
    """Writes the table into a page; clients without a result are left out."""
    before, _, after = _parts(page)
    rows = "".join(
        f"{_name(client)} | {runtime} | {result} | {_behind(client, behind)} | {version} | {date} |\n"
        for client in CLIENTS
        if client in results
        for passed, behind, runtime, version, date in [results[client]]
        for result in [_PASSED if passed else _FAILED]
    )
    page.write_text(f"{before}{_BEGIN}\n{_HEAD}{rows}\n{_END}{after}")


def _name(client: Client) -> str:
    """The first columns of a row."""
    return f"| `{client.package}` | {client.version} | {client.what}"


def _behind(client: Client, passed: bool) -> str:
    """The column about a gateway."""
    if not client.generates:
        return f"no: {client.refused}"
    if not passed:
        return _FAILED
    return f"{_PASSED}, without {client.refused}" if client.refused else _PASSED


def _parts(page: Path) -> tuple[str, str, str]:
    """What comes before the table, the table, and what comes after it."""
    before, _, rest = page.read_text().partition(_BEGIN)
    table, _, after = rest.partition(_END)
    return before, table.strip(), after
