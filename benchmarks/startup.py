"""Measures the time from the start of `penstock serve` to its first 200 at /readyz, for each quantisation in turn.

python benchmarks/startup.py MODEL_DIR --json benchmarks/results/avx512/startup.json
"""

import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from results import parser, write
from servers import start

PORT = 8749


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def start_once(model: str, quantization: str, port: int) -> float:
    """Seconds until the server is ready. Stops the server."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "penstock", "serve", model, "--port", str(port)]
    command += ["--quantization", quantization]
    server = start(command, stderr=subprocess.DEVNULL)
    try:
        while not ready(f"http://127.0.0.1:{port}/readyz"):
            if server.poll() is not None:
                raise RuntimeError(f"the server exited with status {server.returncode} before it was ready")
            time.sleep(0.01)
        return time.perf_counter() - began
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model")
    arguments.add_argument("--quantizations", default="none,int8,int4")
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--port", type=int, default=PORT)
    args = arguments.parse_args()
    seconds: dict[str, list[float]] = {quantization: [] for quantization in args.quantizations.split(",")}
    start_once(args.model, next(iter(seconds)), args.port)  # a warm-up, as the checkpoint may not be in the page cache
    for _ in range(args.runs):
        for quantization, each in seconds.items():
            each.append(round(start_once(args.model, quantization, args.port), 2))
    size = sum(path.stat().st_size for path in Path(args.model).glob("*.safetensors"))
    medians = {quantization: statistics.median(each) for quantization, each in seconds.items()}
    figures = {"checkpoint_gb": round(size / 1e9, 3), "seconds": seconds, "median_s": medians}
    write({"benchmark": "startup", **figures}, args.json)


if __name__ == "__main__":
    main()
