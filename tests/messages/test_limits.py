"""Ranges of sampling parameters: each refusal names the parameter, its value, the limit and what to do."""

import pytest

from penstock.messages import InvalidParameter, RequestRejected, SamplingParams, check_sampling

NAN, INF = float("nan"), float("inf")

REFUSED: list[tuple[str, object, str]] = [
    ("seed", -1, "18446744073709551615"),
    ("seed", 2**64, "18446744073709551615"),
    ("max_tokens", -1, "0 or more"),
    ("min_tokens", -1, "from 0 to max_tokens"),
    ("min_tokens", 11, "max_tokens (10)"),
    ("temperature", -0.1, "0 (greedy) or more"),
    ("temperature", NAN, "finite"),
    ("temperature", INF, "finite"),
    ("top_k", -1, "0 (off)"),
    ("top_p", -0.1, "from 0 to 1"),
    ("top_p", 1.01, "from 0 to 1"),
    ("top_p", NAN, "from 0 to 1"),
    ("min_p", 2.0, "from 0 to 1"),
    ("min_p", NAN, "from 0 to 1"),
    ("top_n_sigma", -0.1, "0 (off) or more"),
    ("top_n_sigma", INF, "finite"),
    ("presence_penalty", 2.1, "from -2 to 2"),
    ("presence_penalty", NAN, "from -2 to 2"),
    ("frequency_penalty", -2.1, "from -2 to 2"),
    ("repetition_penalty", 0.0, "from 0.01 to 100"),
    ("repetition_penalty", -1.0, "from 0.01 to 100"),
    ("repetition_penalty", INF, "from 0.01 to 100"),
    ("logprobs", 21, "from 0 to 20"),
    ("logprobs", -1, "from 0 to 20"),
    ("prompt_logprobs", 21, "from 0 to 20"),
    ("logit_bias", {100: 1.0}, "from 0 to 99"),
    ("logit_bias", {-1: 1.0}, "from 0 to 99"),
    ("logit_bias", {5: 101.0}, "from -100 to 100"),
    ("logit_bias", {5: NAN}, "from -100 to 100"),
    ("logit_bias", dict.fromkeys(range(1025), 1.0), "1024"),
    ("stop_token_ids", (100,), "from 0 to 99"),
    ("stop_token_ids", (1,) * 257, "256"),
]


def params(**given: object) -> SamplingParams:
    return SamplingParams(**({"seed": 0, "max_tokens": 10} | given))  # type: ignore[arg-type]


@pytest.mark.parametrize(("param", "value", "limit"), REFUSED, ids=lambda value: str(value)[:30])
def test_refused(param: str, value: object, limit: str) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        check_sampling(params(**{param: value}), vocab_size=100, max_logprobs=20)
    message = str(refusal.value)
    assert refusal.value.param == param and isinstance(refusal.value, RequestRejected)
    assert message.startswith(param) and limit in message and ": " in message
    if isinstance(value, int | float):
        assert str(value) in message


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"seed": 2**64 - 1, "max_tokens": 0},
        {"temperature": 0.0, "top_p": 0.0, "min_p": 1.0, "top_k": 10**9},
        {"temperature": 1e300, "top_p": 1.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
        {"logprobs": 20, "prompt_logprobs": 0, "min_tokens": 10},
        {"logit_bias": {0: -100.0, 99: 100.0}, "stop_token_ids": (0, 99)},
        {"eos_token_ids": (100,)},  # the model's own: an id that its logits lack is never produced
    ],
    ids=str,
)
def test_accepted(given: dict[str, object]) -> None:
    check_sampling(params(**given), vocab_size=100, max_logprobs=20)
