"""The text of an error that ends an engine or a rank, for its user."""

import logging
import traceback

from penstock.messages import EngineError

TRACEBACK_LINES = 6  # of an unforeseen error, in the text returned; the log gets all of them

log = logging.getLogger(__name__)


def is_for_user(error: Exception) -> bool:
    """True when the error's message was written for a user: an OSError, an EngineError, or a ValueError of our own."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    ours = "penstock" in {name.partition(".")[0] for name in (type(error).__module__, frame.f_globals["__name__"])}
    return isinstance(error, OSError | EngineError) or (ours and isinstance(error, ValueError))


def error_text(error: Exception) -> str:
    """Return the message of an error that was written for a user.

    For any other error, return its type, its message and the last lines of its traceback, and log all of it.
    """
    if is_for_user(error):
        return str(error)
    log.error("this process has failed", exc_info=error)
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join([f"{type(error).__name__}: {error}", *lines[-TRACEBACK_LINES:-1]])
