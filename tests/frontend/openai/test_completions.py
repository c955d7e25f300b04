"""/v1/completions, whole answers: text, stops, lengths, prompts of every kind, echo and logprobs."""

from collections.abc import Callable

import pytest

from tests.frontend.conftest import NAME, Site
from tests.frontend.scripted import logprob_of

PATH = "/v1/completions"


async def test_answer_has_the_shape_clients_know(site: Site) -> None:
    site.says("hello world")
    site.engine.cached_tokens = 2
    answer = await site.post(PATH, prompt="this is")
    prompt_ids = site.tokenizer.encode("this is")
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "text_completion",
        "model": NAME,
        "choices": [{"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(site.tokenizer.encode("hello world")) + 1,
            "total_tokens": len(prompt_ids) + len(site.tokenizer.encode("hello world")) + 1,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
        },
    }
    assert site.engine.requests[0].prompt_ids == tuple(prompt_ids)
    assert site.engine.aborted == []


@pytest.mark.parametrize("cuts", [(1,), (2,), (3, 1), (50,)])
async def test_text_of_many_byte_characters_is_whole_however_it_is_cut(site: Site, cuts: tuple[int, ...]) -> None:
    text = "Größe 你好 👍🏽!"
    site.says(text, cuts=cuts)
    answer = await site.post(PATH, prompt="x", max_tokens=60)
    assert answer["choices"][0]["text"] == text
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("cuts", [(1,), (2,), (5, 1), (50,)])
@pytest.mark.parametrize(
    ("stop", "include", "expected"),
    [
        ("stop", False, "hello "),
        ("stop", True, "hello stop"),
        (["nowhere", "p wor"], False, "hello sto"),
        (["world", "o s"], False, "hell"),
        ("never", False, "hello stop world"),
    ],
)
async def test_stop_strings(
    site: Site, cuts: tuple[int, ...], stop: str | list[str], include: bool, expected: str
) -> None:
    ids = site.says("hello stop world", cuts=cuts)
    fields = {"stop": stop, "include_stop_str_in_output": include, "max_tokens": 40}
    answer = await site.post(PATH, prompt="x", **fields)
    assert answer["choices"][0]["text"] == expected
    assert answer["choices"][0]["finish_reason"] == "stop"
    tokens = answer["usage"]["completion_tokens"]
    if stop == "never":
        assert tokens == len(ids) + 1
        assert site.engine.finished == []
    else:
        kept = site.tokenizer.decode(ids[:tokens])
        shorter = site.tokenizer.decode(ids[: tokens - 1])
        strings = [stop] if isinstance(stop, str) else stop
        assert any(s in kept for s in strings) and not any(s in shorter for s in strings)
        ended_by_itself = cuts == (50,)
        expected_calls = [] if ended_by_itself else [(site.engine.requests[0].request_id, 0, "stop", tokens)]
        assert site.engine.finished == expected_calls


async def test_a_stop_string_does_not_count_before_min_tokens(site: Site) -> None:
    ids = site.says("stop and stop")
    answer = await site.post(PATH, prompt="x", stop="stop", min_tokens=len(ids) - 1)
    assert answer["choices"][0]["text"] == "stop and "


async def test_length_is_the_apis_default_or_what_is_left_of_the_context(make_site: Callable[..., Site]) -> None:
    site = make_site(lambda request, choice: [30], max_model_len=20)
    answer = await site.post(PATH, prompt=[1, 2, 3])
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
    answer = await site.post(PATH, prompt=[1] * 10)
    assert answer["usage"]["completion_tokens"] == 10
    answer = await site.post(PATH, prompt=[1] * 10, max_tokens=10)
    assert answer["usage"]["completion_tokens"] == 10


async def test_choices_are_numbered_prompt_by_prompt(make_site: Callable[..., Site]) -> None:
    site = make_site(lambda request, choice: [60 + request.prompt_ids[0] + choice])
    answer = await site.post(PATH, prompt=[[1, 9], [5], [9, 9, 9]], n=2, max_tokens=2)
    expected = [site.tokenizer.decode([60 + first + choice] * 2) for first in (1, 5, 9) for choice in (0, 1)]
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(expected))
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 12
    assert len({request.request_id for request in site.engine.requests}) == 3


@pytest.mark.parametrize("prompt", ["hello", ["hello"], ["hello", "world"]])
async def test_text_prompts(site: Site, prompt: str | list[str]) -> None:
    answer = await site.post(PATH, prompt=prompt)
    texts = [prompt] if isinstance(prompt, str) else prompt
    assert [request.prompt_ids for request in site.engine.requests] == [tuple(site.tokenizer.encode(t)) for t in texts]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))


async def test_a_nul_byte_is_text(site: Site) -> None:
    await site.post(PATH, prompt="a\x00b")
    assert site.tokenizer.decode(site.engine.requests[0].prompt_ids) == "a\x00b"


async def test_parameters_reach_the_engine(site: Site) -> None:
    await site.post(
        PATH,
        prompt="x",
        max_tokens=7,
        temperature=0.5,
        top_p=0.75,
        top_k=-1,
        min_p=0.25,
        presence_penalty=1,
        frequency_penalty=-2,
        repetition_penalty=1.5,
        logit_bias={"3": -100, "4": 5.5},
        seed=-1,
        min_tokens=2,
        stop_token_ids=[7],
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=2,
        cache_salt="salt",
        priority=-3,
        n=2,
        user="someone",
        store=False,
        metadata={"a": "b"},
        best_of=2,
        suffix=None,
    )
    (request,) = site.engine.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.75, 0)
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.25, 1, -2)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, {3: -100, 4: 5.5})
    assert (sampling.seed, sampling.min_tokens, sampling.stops()) == (2**64 - 1, 2, {7})
    assert (sampling.logprobs, sampling.prompt_logprobs) == (3, 2)
    assert (request.cache_salt, request.priority, request.n) == ("salt", -3, 2)


async def test_defaults_of_the_model_and_of_the_server(make_site: Callable[..., Site]) -> None:
    site = make_site(defaults={"temperature": 0.25, "top_k": 9}, seed=11)
    await site.post(PATH, prompt="x")
    await site.post(PATH, prompt="x", temperature=1, seed=5)
    first, second = (request.sampling for request in site.engine.requests)
    assert (first.temperature, first.top_k, first.seed) == (0.25, 9, 11)
    assert (second.temperature, second.top_k, second.seed) == (1, 9, 5)


async def test_every_prompt_without_a_seed_draws_its_own(site: Site) -> None:
    await site.post(PATH, prompt=["a", "b", "c"])
    assert len({request.sampling.seed for request in site.engine.requests}) == 3


async def test_a_stop_token_is_counted_but_not_shown(site: Site) -> None:
    ids = site.tokenizer.encode("hello world")
    site.says("hello world")
    answer = await site.post(PATH, prompt="x", stop_token_ids=[ids[1]], logprobs=0)
    assert answer["choices"][0]["text"] == site.tokenizer.decode(ids[:1])
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["logprobs"]["tokens"] == [site.tokenizer.token(i) for i in ids[:2]]
    shown = await site.post(PATH, prompt="x", stop_token_ids=[ids[1]], include_stop_str_in_output=True)
    assert shown["choices"][0]["text"] == site.tokenizer.decode(ids[:2])


async def test_special_tokens_are_shown_on_request(site: Site) -> None:
    site.says("<|im_start|>hello")
    assert (await site.post(PATH, prompt="x"))["choices"][0]["text"] == "hello"
    answer = await site.post(PATH, prompt="x", skip_special_tokens=False)
    assert answer["choices"][0]["text"] == "<|im_start|>hello"


async def test_logprobs_are_parallel_lists(site: Site) -> None:
    ids = site.says("hello wörld", ends=False, cuts=(3, 1))
    answer = await site.post(PATH, prompt="x", logprobs=2, max_tokens=len(ids))
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [site.tokenizer.token(i) for i in ids]
    assert logprobs["token_logprobs"] == [logprob_of(i) for i in ids]
    for token_id, top in zip(ids, logprobs["top_logprobs"], strict=True):
        assert top == {
            site.tokenizer.token(token_id): logprob_of(token_id),
            site.tokenizer.token(token_id + 1): logprob_of(token_id) - 1,
        }
    text = answer["choices"][0]["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert text[offset:].startswith(token)
    assert any(token.startswith("bytes:") for token in logprobs["tokens"])


async def test_logprobs_end_with_the_stop_string(site: Site) -> None:
    ids = site.says("hello stop world", cuts=(50,))
    answer = await site.post(PATH, prompt="x", logprobs=0, stop="stop")
    kept = answer["usage"]["completion_tokens"]
    assert answer["choices"][0]["logprobs"]["tokens"] == [site.tokenizer.token(i) for i in ids[:kept]]
    assert len(answer["choices"][0]["logprobs"]["text_offset"]) == kept


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_text", [True, False])
async def test_scoring_a_prompt_as_evaluation_harnesses_do(site: Site, max_tokens: int, as_text: bool) -> None:
    ids = site.tokenizer.encode("hello wörld")
    prompt = "hello wörld" if as_text else ids
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    choice = (answer := await site.post(PATH, prompt=prompt, **fields))["choices"][0]
    logprobs = choice["logprobs"]
    expected = [*ids, *[20] * max_tokens]
    assert choice["text"] == "hello wörld" + site.tokenizer.decode([20] * max_tokens)
    assert choice["finish_reason"] == "length"
    assert logprobs["tokens"] == [site.tokenizer.token(i) for i in expected]
    assert logprobs["token_logprobs"] == [None, *[logprob_of(i) for i in expected[1:]]]
    assert logprobs["top_logprobs"] == [None, *[{site.tokenizer.token(i): logprob_of(i)} for i in expected[1:]]]
    assert logprobs["text_offset"][0] == 0
    assert len(logprobs["text_offset"]) == len(expected)
    assert logprobs["text_offset"][-1] == (len("hello wörld") if max_tokens else len("hello wörl"))
    assert answer["usage"]["completion_tokens"] == max_tokens
    pairs = zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True)
    assert all(value == max(top.values()) for value, top in pairs)  # how a harness sees that a token was the likeliest


async def test_echo_without_logprobs_and_with_several_choices(site: Site) -> None:
    answer = await site.post(PATH, prompt=[[62, 63], [60, 61]], echo=True, n=2, max_tokens=1)
    said = [site.tokenizer.decode([20]), site.tokenizer.decode([21])]
    prompts = [site.tokenizer.decode(ids) for ids in ([62, 63], [60, 61])]
    assert [choice["text"] for choice in answer["choices"]] == [prompt + text for prompt in prompts for text in said]


@pytest.mark.parametrize("late", [False, True])
async def test_every_choice_gets_the_prompts_logprobs(site: Site, late: bool) -> None:
    site.engine.prompt_logprobs_late = late
    site.engine.cached_tokens = 2
    answer = await site.post(PATH, prompt=[40, 41, 42], echo=True, n=3, max_tokens=2, logprobs=0)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    for number, choice in enumerate(answer["choices"]):
        assert choice["logprobs"]["tokens"] == [site.tokenizer.token(i) for i in [40, 41, 42, 20 + number, 20 + number]]
        assert choice["logprobs"]["token_logprobs"][1] == logprob_of(41)


async def test_a_prompt_of_one_token_has_no_logprobs_to_wait_for(site: Site) -> None:
    answer = await site.post(PATH, prompt=[40], echo=True, n=2, max_tokens=1, logprobs=0)
    assert [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]] == [
        [None, logprob_of(20)],
        [None, logprob_of(21)],
    ]


async def test_prompt_logprobs_in_vllms_shape(site: Site) -> None:
    answer = await site.post(PATH, prompt=[40, 41], prompt_logprobs=2, max_tokens=1)
    assert answer["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "41": {"logprob": logprob_of(41), "rank": 1, "decoded_token": site.tokenizer.token(41)},
            "42": {"logprob": logprob_of(41) - 1, "rank": 2, "decoded_token": site.tokenizer.token(42)},
        },
    ]
