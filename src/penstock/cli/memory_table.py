"""Shows what a model takes of the memory."""

from rich.table import Table

from penstock.config import Resolved, format_bytes


def memory_table(resolved: Resolved) -> Table:
    """Returns the memory table. If there are several ranks, it describes the rank with the least free memory."""
    title, rows, ranks = "Memory", resolved.memory.rows, resolved.ranks
    if len(ranks) > 1:
        title += f", rank {ranks.index(resolved.memory)} of {len(ranks)}, which has the least to spare"
    table = Table(title=title, title_justify="left")
    table.add_column("for")
    table.add_column("size", justify="right")
    table.add_column("", style="dim", overflow="fold")
    for row in rows:
        table.add_row(row.name, format_bytes(row.bytes), row.note, end_section=row is rows[-2])
    return table
