"""Compares usage and cost of answers through the gateway with litellm's: python benchmarks/gateway_prices.py PYTHON

PYTHON is that of an environment with litellm. Both read the same streams from a provider on loopback, and both have
litellm's prices. The exit status is 1 if a count differs, or a cost by more than a billionth.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web
from prometheus_client import CollectorRegistry

from penstock.config import ServerConfig
from penstock.frontend import ModelRegistry, create_app
from penstock.frontend.providers.gateway import open_gateway
from penstock.observe.metrics import Metrics

PEER = Path(__file__).parent / "peers" / "litellm_usage.py"
MODELS = ("openai/gpt-4o-mini", "openai/gpt-5-mini", "anthropic/claude-haiku-4-5", "anthropic/claude-sonnet-4-5")
COUNTS = ((1, 0, 1), (1000, 600, 50), (99_000, 98_304, 4096), (12, 12, 0), (123_456, 0, 8191))  # prompt, cached, output


def events(kind: str, prompt: int, cached: int, output: int) -> bytes:
    """A stream of a short answer with these counts."""
    if kind == "openai":
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        delta = {"role": "assistant", "content": "Hi"}
        rows: list[Any] = [
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {**head, "choices": [], "usage": usage},
        ]
        return b"".join(b"data: %s\n\n" % json.dumps(row).encode() for row in rows) + b"data: [DONE]\n\n"
    usage = {"input_tokens": prompt - cached, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
    rows = [
        {"type": "message_start", "message": {**message, "usage": {**usage, "output_tokens": min(output, 1)}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": output}},
        {"type": "message_stop"},
    ]
    return b"".join(b"event: %s\ndata: %s\n\n" % (row["type"].encode(), json.dumps(row).encode()) for row in rows)


async def peer(python: str, question: dict[str, Any]) -> list[dict[str, float]]:
    done = await asyncio.to_thread(
        subprocess.run, [python, str(PEER)], input=json.dumps(question).encode(), capture_output=True, check=True
    )
    return json.loads(done.stdout)


async def answer(request: web.Request) -> web.Response:
    kind = request.match_info["kind"]
    body = events(kind, *COUNTS[int(request.match_info["case"])])
    return web.Response(body=body, content_type="text/event-stream")


async def through_gateway(cases: list[tuple[str, str]], prices: dict[str, Any]) -> list[dict[str, float]]:
    """Usage and cost of each case, a model and a URL."""
    providers = {}
    for number, (model, url) in enumerate(cases):
        kind = model.partition("/")[0]
        entry = {"kind": kind, "url": url + ("/v1" if kind == "anthropic" else ""), "private": True}
        providers[f"p{number}"] = {**entry, "models": {f"m{number}": prices[model]}}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "providers.yaml"
        file.write_text(json.dumps({"providers": providers}))
        registry, metrics = ModelRegistry(), Metrics(CollectorRegistry())
        chosen = open_gateway(str(file), registry, metrics)
        app = create_app(registry, ServerConfig(state_dir="none"), metrics, fallbacks=chosen)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
            for number in range(len(cases)):
                body = {"model": f"m{number}", "messages": [{"role": "user", "content": "hello"}]}
                used = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()["usage"]
                labels = {"provider": f"p{number}", "model_name": f"m{number}"}
                cost = metrics.registry.get_sample_value("penstock_provider_cost_total", labels)
                cached = used["prompt_tokens_details"]["cached_tokens"]
                counts = {"prompt": used["prompt_tokens"], "cached": cached, "output": used["completion_tokens"]}
                found.append({**counts, "cost": cost or 0.0})
        await registry.close()
    return found


async def main(python: str) -> int:
    prices = dict(zip(MODELS, await peer(python, {"prices": MODELS}), strict=True))
    app = web.Application()
    app.router.add_post("/{kind}/{case}/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    root = f"http://127.0.0.1:{runner.addresses[0][1]}"
    cases = [(model, f"{root}/{model.partition('/')[0]}/{case}") for model in MODELS for case in range(len(COUNTS))]
    theirs = await peer(python, {"ask": cases})
    ours = await through_gateway(cases, prices)
    await runner.cleanup()
    different = 0
    for (model, _), own, other in zip(cases, ours, theirs, strict=True):
        same = abs(own["cost"] - other["cost"]) < 1e-9 and all(own[key] == other[key] for key in own if key != "cost")
        different += not same
        print(f"{model:28} {own['prompt']:7} {own['cached']:6} {own['output']:5} {own['cost']:.8f}", end=" ")
        print(f"{other['cost']:.8f}" if same else f"DIFFERS: litellm has {other}")
    print(f"{len(cases) - different} of {len(cases)} answers have litellm's usage and cost")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
