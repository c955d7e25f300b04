"""The environment of child processes. Kept free of imports, so that the engine's process starts early."""

from collections.abc import Mapping

# NumPy's BLAS threads would spin beside the imports, and neither a server nor its children use them.
# onnxruntime would start a thread that reports to its makers.
QUIET = {"OPENBLAS_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1"}
SECRETS = frozenset(
    ("KEY", "KEYS", "TOKEN", "TOKENS", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIALS")
)
OF_RAY = "RAY_"  # an engine with ranks on a Ray cluster connects to it, perhaps with a token


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that computes, without variables whose names say that they hold a secret.

    The server's process checks API keys and downloads models, so engines, their ranks, and the processes that parse
    clients' texts need no secret. Their memory and /proc/PID/environ then hold none.
    """
    return {name: value for name, value in environ.items() if not _is_secret(name)} | QUIET


def _is_secret(name: str) -> bool:
    """PENSTOCK_API_KEY, HF_TOKEN, AWS_SECRET_ACCESS_KEY and the like."""
    return not name.startswith(OF_RAY) and not SECRETS.isdisjoint(name.upper().split("_"))
