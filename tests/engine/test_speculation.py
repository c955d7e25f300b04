"""An engine speculates where it is configured to and its kernels give the same bits for a draft."""

import logging

import pytest

from penstock.messages import GenerateRequest, SamplingParams
from tests.engine.simulated import Scenario, ask, expected, start


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("exact", [True, False])
async def test_drafts_where_they_are_exact(kind: str, exact: bool, caplog: pytest.LogCaptureFixture) -> None:
    sampling = SamplingParams(seed=1, max_tokens=60)
    request = GenerateRequest(request_id="a", prompt_ids=(1, 2, 3), sampling=sampling)
    predicted = GenerateRequest(
        request_id="b", prompt_ids=(1, 2, 3), sampling=sampling, prediction_ids=tuple(expected(request))
    )
    scenario = Scenario(step_seconds=0.002, exact_drafts=exact)
    with caplog.at_level(logging.WARNING):
        client = await start(kind, scenario, speculation="ngram", num_speculative_tokens=8)
    try:
        for each in (request, predicted):
            answer = await ask(client, each)
            assert answer.choices[0] == expected(request)
        stats, timing = client.stats(), answer.ends[0].timing
        assert timing is not None
        if exact:
            assert 0 < timing.accepted_prediction <= stats.accepted_tokens  # how many depends on the times of steps
            assert stats.steps < 2 * 60
        else:
            assert stats.drafts == timing.accepted_prediction == 0
            assert kind == "process" or "speculation is off" in caplog.text
    finally:
        await client.close()
