"""An engine that no request waits for: python -m penstock.engine.replacement SOCKET

As penstock.engine.process, but all imports are made at the lowest priority, because other engines compute on the
processors meanwhile.
"""

import gc

from penstock.priority import LOWEST, run_at


def _import() -> None:
    import penstock.engine.process  # noqa: F401
    from penstock.engine.executor import import_runtime

    import_runtime()


if __name__ == "__main__":
    gc.disable()  # as in `serve`
    run_at(LOWEST, _import)
    from penstock.engine.child import end_now
    from penstock.engine.process import MODEL_BACKEND, serve

    end_now(serve(MODEL_BACKEND))
