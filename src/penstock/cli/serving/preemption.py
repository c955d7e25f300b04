"""Sees that the cloud is about to take this machine away, and ends the process as SIGTERM does (docs/fleet.md)."""

import os
import signal
import threading
import time
from pathlib import Path

from penstock.cli.serving.report import log

LOOK_SECONDS = 1.0
MOST_BYTES = 4096  # of an answer that are read
NO_NOTICE = ("", "false", "none")  # answers with status 200 that announce nothing


def watch_for_preemption(source: str) -> None:
    """Looks for a notice every second, on a thread, and sends this process SIGTERM when there is one. `source` is a
    file that appears, or the URL of a page that answers with status 200; "": there is none to look for."""
    if source:
        threading.Thread(target=_watch, args=(source,), name="preemption", daemon=True).start()


def _watch(source: str) -> None:
    announced = _page_announces if source.startswith(("http://", "https://")) else os.path.exists
    while not announced(source):
        time.sleep(LOOK_SECONDS)
    log.warning("this machine is about to be taken away, says %s: requests end or move", Path(source).name)
    os.kill(os.getpid(), signal.SIGTERM)


def _page_announces(url: str) -> bool:
    import urllib.request  # not above: a server without a notice starts sooner

    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})  # which Google's service requires
    try:
        with urllib.request.urlopen(request, timeout=LOOK_SECONDS) as answer:
            said = answer.read(MOST_BYTES).decode("utf-8", "replace")
    except OSError:  # also a status such as 404, which means no notice
        return False
    return said.strip().lower() not in NO_NOTICE
