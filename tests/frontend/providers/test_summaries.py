"""Summaries of chats that are too long, by a model of a provider."""

import pytest

from penstock.frontend.requests.context_policy import INSTRUCTION
from tests.frontend.providers.conftest import FakeProvider, Make, Reply
from tests.frontend.providers.streams import SAID, STREAMS
from tests.frontend.test_context_policy import SYSTEM
from tests.frontend.test_summaries import CONTEXT, ask


async def test_a_provider_summarises_for_a_model_here(gateway: Make, provider: FakeProvider) -> None:
    site = await gateway("openai", server={"context_policy": "summarise:remote"}, length=CONTEXT)
    provider.replies = [Reply(STREAMS["openai"][0])]
    answer = await ask(site, 50)
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    (sent,) = provider.requests
    assert sent["messages"][-1] == {"role": "user", "content": INSTRUCTION} and sent["messages"][0] == SYSTEM
    assert "temperature" not in sent and sent["max_tokens"] == CONTEXT // 16
    assert f"[Earlier in this conversation: {SAID}]" in site.tokenizer.decode(list(site.engine.requests[-1].prompt_ids))
    assert answer.headers["x-summary-tokens"] == "1000, 50" and site.value(
        "penstock_provider_cost_total", provider="there", model_name="remote"
    ) == pytest.approx((400 * 2.0 + 600 * 0.5 + 50 * 10.0) / 1e6)
