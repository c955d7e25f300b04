"""Implements `penstock replay`: runs the scheduler again on the events of a log."""

from penstock.observe.reporting import reporting
from penstock.schedule import ReplayMismatch, read_events
from penstock.schedule import replay as run_again


def replay(path: str) -> int:
    """Prints whether the log's events give the plans that the log names. Returns 0 when they do, 1 when they do not.

    A last line that was cut off, as by a process that was killed, is left out. Raises ValueError for a file that cannot
    be read or is no event log.
    """
    try:
        with open(path, "rb") as file:
            lines = file.readlines()
    except OSError as error:
        raise ValueError(
            f"{path!r} cannot be read: {str(error.strerror).lower()}; give the file of penstock serve --event-log"
        ) from None
    cut_off = bool(lines) and not lines[-1].endswith(b"\n")
    if cut_off:
        lines.pop()
    if not lines:
        raise ValueError(f"{path} has no event: give the file of penstock serve --event-log")
    try:
        with reporting(f"replaying {len(lines):,} events"):
            plans = run_again(read_events(lines))
    except ReplayMismatch as error:
        print(f"{path}: {error}")
        return 1
    note = "; the last line was cut off and left out" if cut_off else ""
    print(f"{path}: {len(lines)} events give the same {len(plans)} plans{note}")
    return 0
