"""Sends load to a KServe v2 server with tritonclient over gRPC.

python triton_load.py HOST:PORT MODEL CLIENTS SECONDS [RATE] prints a line of JSON: requests a second, percentiles of
the latency in milliseconds, the client's processor time of a request in microseconds, and for each request when it was
sent, in seconds, and its latency. With RATE, requests come at that rate a second, whatever the answers do. It runs in
an environment that has tritonclient[grpc].
"""

import asyncio
import json
import sys
import time

import numpy as np
import tritonclient.grpc.aio as triton

WARM_SECONDS = 1.0


async def main(address: str, model: str, clients: int, seconds: float, rate: float) -> None:
    client = triton.InferenceServerClient(address)
    metadata = await client.get_model_metadata(model)
    shape = [1, *(int(size) for size in metadata.inputs[0].shape[1:])]
    made = triton.InferInput(metadata.inputs[0].name, shape, metadata.inputs[0].datatype)
    made.set_data_from_numpy(np.ones(shape, np.float32))
    points: list[tuple[float, float]] = []

    async def ask() -> None:
        began = time.perf_counter()
        await client.infer(model, [made])
        if began > start:
            points.append((round(began - start, 4), round((time.perf_counter() - began) * 1000, 3)))

    async def loop() -> None:
        while time.perf_counter() < end:
            await ask()

    cpu = time.process_time()
    start = time.perf_counter() + WARM_SECONDS
    end = start + seconds
    if rate:
        tasks = []
        while time.perf_counter() < end:
            tasks.append(asyncio.create_task(ask()))
            await asyncio.sleep(1 / rate)
        await asyncio.gather(*tasks)
    else:
        await asyncio.gather(*(loop() for _ in range(clients)))
    p50, p99 = (round(float(each), 3) for each in np.percentile([latency for _, latency in points], [50, 99]))
    rate = len(points) / seconds
    cpu_us = round((time.process_time() - cpu) / (rate * (seconds + WARM_SECONDS)) * 1e6, 1)
    print(json.dumps({"rate": rate, "p50_ms": p50, "p99_ms": p99, "client_cpu_us": cpu_us, "points": points}))
    await client.close()


if __name__ == "__main__":
    address, model, clients, seconds, *rest = sys.argv[1:]
    asyncio.run(main(address, model, int(clients), float(seconds), float(rest[0]) if rest else 0.0))
