"""The machine under the server: its clock, its disk."""

import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from penstock.weights.packaged import EMBEDDED
from tests.chaos.load import ask, ask_all, request, require_same
from tests.chaos.place import FLAGS, Failed, place, require

HOUR = 3600.0
# Adds the number of seconds in a file to the wall clock of a process, and to no other clock.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile double *offset(void) {
    static volatile double *shared;
    static double none;
    if (!shared) {
        const char *name = getenv("CHAOS_CLOCK");
        int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
        void *found = file < 0 ? MAP_FAILED : mmap(0, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
        shared = found == MAP_FAILED ? &none : found;
    }
    return shared;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (!status && clock == CLOCK_REALTIME) now->tv_sec += (long)*offset();
    return status;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec fine;
    if (clock_gettime(CLOCK_REALTIME, &fine)) return -1;
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (result) *result = fine.tv_sec;
    return fine.tv_sec;
}
"""


async def wall_clock(folder: Path) -> dict[str, Any]:
    """A wall clock that jumps an hour ahead and back: no timeout is early or missed."""
    folder.mkdir(parents=True)
    (folder / "clock.c").write_text(CLOCK)
    library, shift = folder / "clock.so", folder / "shift"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, folder / "clock.c", "-ldl"], check=True)
    shift.write_bytes(struct.pack("d", 0.0))

    def jump(seconds: float) -> None:
        with shift.open("r+b", buffering=0) as file:
            file.write(struct.pack("d", seconds))

    # Not with LD_PRELOAD for the test's own process.
    preload = ("/usr/bin/env", f"LD_PRELOAD={library}", f"CHAOS_CLOCK={shift}")
    async with place(folder / "server", "--step-deadline", "30", wrapper=preload) as site:
        bodies = [request(number, 400) for number in range(8)]
        undisturbed = await ask_all(site, bodies)
        before = await site.baseline()
        for seconds in (HOUR, -HOUR, 0.0):
            streams = asyncio.create_task(ask_all(site, bodies))
            await asyncio.sleep(0.2)
            jump(seconds)
            created = await _created(site.url, site.http)
            require(abs(created - time.time() - seconds) < 5, "the clock of the server has not moved")
            require_same(await streams, undisturbed)
            engine = site.engine_pid
            os.kill(engine, signal.SIGSTOP)  # so that no request ends before its deadline
            try:
                began = time.monotonic()
                told = await ask(site, request(1, 64, timeout=1.0, stream=False))
                late = time.monotonic() - began
            finally:
                os.kill(engine, signal.SIGCONT)
            require(told.status == 504 and 0.9 < late < 6, f"status {told.status} after {late:.1f} s of a limit of 1 s")
        require(await site.value("penstock_engine_restarts_total") == 0, "the engine was started again")
        return {"jumps_h": "+1, -2, +1", "streams_same": 24} | await site.require_baseline(before)


async def _created(url: str, http: Any) -> float:
    async with http.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}) as answer:
        return float((await answer.json())["created"])


async def full_disk(folder: Path) -> dict[str, Any]:
    """A disk that is full: a batch fails with one line, and goes on when there is room; a server with a full log goes
    on."""
    folder.mkdir(parents=True)
    source, output = folder / "requests.jsonl", folder / "answers.jsonl"
    body = {"prompt": "import os\n", "max_tokens": 8}
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {**body, "seed": i}}
        for i in range(400)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    small = ("/bin/sh", "-c", 'ulimit -f 64; exec "$0" "$@"')  # blocks of 512 or 1024 bytes
    command = (sys.executable, "-m", "penstock", "batch", str(source), str(output), "--model", EMBEDDED)
    batch = (*command, "--threads", "1", *FLAGS)
    full = await asyncio.to_thread(subprocess.run, [*small, *batch], capture_output=True, text=True, timeout=300)
    last = full.stderr.strip().splitlines()[-1] if full.stderr.strip() else ""
    require(full.returncode == 1, f"the batch ended with {full.returncode}: {full.stderr[-500:]}")
    require(last.startswith("penstock: ") and "Traceback" not in full.stderr, f"not one line: {full.stderr[-800:]}")
    written = sum(1 for _ in output.open())
    again = await asyncio.to_thread(subprocess.run, [*batch], capture_output=True, text=True, timeout=300)
    require(again.returncode == 0, f"the second batch ended with {again.returncode}: {again.stderr[-500:]}")
    ids = [json.loads(line)["custom_id"] for line in output.open()]
    require(sorted(ids) == sorted(line["custom_id"] for line in lines), f"{len(ids)} answers, {len(set(ids))} ids")
    log = await _full_log(folder, small)
    return {"answers_before": written, "each_once": len(ids), "error": last.removeprefix("penstock: ")[:60], **log}


async def _full_log(folder: Path, small: tuple[str, ...]) -> dict[str, Any]:
    """A server whose event log cannot grow."""
    bodies = [request(number, 300) for number in range(8)]
    async with place(folder / "plain") as site:
        undisturbed = await ask_all(site, bodies)
    try:
        async with place(folder / "server", "--event-log", str(folder / "events"), wrapper=small) as site:
            for _ in range(4):
                require_same(await ask_all(site, bodies), undisturbed)
            restarts = await site.value("penstock_engine_restarts_total")
            require(restarts == 0, f"{restarts:g} restarts because of the log")
    except AssertionError as error:
        raise Failed(str(error)) from error
    return {"log_bytes": (folder / "events").stat().st_size}
