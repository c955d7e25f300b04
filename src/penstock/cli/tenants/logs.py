"""Implements `penstock logs`."""

import datetime
import json

from penstock.cli.models.table import print_table, printable
from penstock.cli.tenants.ledger import interval, one_tenant, open_for_reading
from penstock.frontend.tenants.ledger import FIELDS, rows_of


def show_logs(
    tenant: str | None, slow: float | None, last: int, ledger: str | None, port: int, *, errors: bool, as_json: bool
) -> None:
    """Prints the last requests of a ledger that fit. Raises ValueError if there is no ledger."""
    where: dict[str, object] = {}
    if (only := one_tenant(tenant)) is not None:
        where["tenant = ?"] = only
    if slow is not None:
        where["total_ms >= ?"] = 1000 * slow
    if errors:
        where["status >= ?"] = 400
    rows = rows_of(open_for_reading(ledger, port), *interval(None, None), where, last)
    found = [dict(zip(FIELDS, row, strict=True)) for row in rows]
    if as_json:
        for entry in found:
            print(json.dumps(entry))
        return
    if found:
        print_table([_row(entry) for entry in found])
    else:
        print("no request in the ledger fits")


def _row(entry: dict[str, object]) -> dict[str, str]:
    began = datetime.datetime.fromtimestamp(float(str(entry["began"])), datetime.UTC)
    times = {name: f"{entry[name]:.0f}" for name in ("queue_ms", "ttft_ms", "total_ms", "step_ms")}
    return {
        "BEGAN": f"{began:%Y-%m-%d %H:%M:%S}",
        "REQUEST": printable(str(entry["request_id"])),
        "TENANT": f"{entry['tenant']}/{entry['key']}",
        "STATUS": f"{entry['status']} {entry['error']}".rstrip(),
        **{name.upper(): str(entry[name]) for name in ("prompt", "cached", "output")},
        **{name.upper().replace("_", " "): time for name, time in times.items()},
    }
