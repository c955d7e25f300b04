"""An engine that no request waits for: python -m penstock.engine.replacement SOCKET

As penstock.engine.process, but a thread of the lowest priority makes all imports, because other engines compute on the
processors meanwhile. A thread ends. A process could not raise its priority again without privileges.
"""

import gc
import os
import sys
import threading

LOWEST_PRIORITY = 19


def _import() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)  # of this thread alone
    import penstock.engine.process  # noqa: F401
    from penstock.engine.executor import import_runtime

    import_runtime()


if __name__ == "__main__":
    gc.disable()  # as in `serve`
    importing = threading.Thread(target=_import, name="imports")
    importing.start()
    importing.join()
    from penstock.engine.process import MODEL_BACKEND, serve

    sys.exit(serve(MODEL_BACKEND))
