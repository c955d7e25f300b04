"""Why something ended, in words for whoever runs it."""

import logging
import traceback

from penstock.messages import EngineError

TRACEBACK_LINES = 6  # of an unforeseen error, in the reason given; the log has all of them

log = logging.getLogger(__name__)


def for_user(error: Exception) -> bool:
    """Whether an error's message was written for a user: what the system says about files, and what our own code
    raises about values, or about an engine."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    ours = "penstock" in {name.partition(".")[0] for name in (type(error).__module__, frame.f_globals["__name__"])}
    return isinstance(error, OSError | EngineError) or (ours and isinstance(error, ValueError))


def reason_for(error: Exception) -> str:
    """The message alone where it was written for a user; else the error with where it came from, and all in the log."""
    if for_user(error):
        return str(error)
    log.error("this process has failed", exc_info=error)
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join([f"{type(error).__name__}: {error}", *lines[-TRACEBACK_LINES:-1]])
