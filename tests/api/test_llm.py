"""The library, with a real model in this process."""

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from penstock import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from tests.engine.processes import children
from tests.smollm2 import smollm2

SETTINGS = {"max_model_len": 1024, "max_num_seqs": 4, "kv_cache_memory": "128MB", "threads": 1}
PROMPTS = ["Hello, my name is", "The capital of France is", "The future of AI is", "One, two, three,", "In the", "A"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(smollm2()), **SETTINGS) as llm:
        yield llm


def test_outputs_come_in_order_and_do_not_depend_on_their_company(llm: LLM) -> None:
    together = llm.generate(PROMPTS * 3, GREEDY)  # more than the engine holds at once
    assert [result.prompt for result in together] == PROMPTS * 3
    for prompt, result in zip(PROMPTS, together, strict=False):
        [alone] = llm.generate(prompt, GREEDY)
        assert alone.outputs == result.outputs
        assert alone.outputs[0].finish_reason == "length" and len(alone.outputs[0].token_ids) == 8
        assert llm.get_tokenizer().decode(alone.outputs[0].token_ids) == alone.outputs[0].text


def test_several_engines_of_a_process_do_not_disturb_each_other(llm: LLM) -> None:
    """One is loaded while the other generates, and then both generate at once."""
    params = SamplingParams(temperature=0, max_tokens=48)
    wanted = [result.outputs for result in llm.generate(PROMPTS, params)]
    with ThreadPoolExecutor(2) as pool:
        loading = pool.submit(LLM, str(smollm2()), **SETTINGS)
        while not loading.done():
            assert [result.outputs for result in llm.generate(PROMPTS, params)] == wanted
        with loading.result() as other:
            for _ in range(3):
                for results in pool.map(lambda each: each.generate(PROMPTS, params), (llm, other)):
                    assert [result.outputs for result in results] == wanted


def test_a_chat_answers(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    [answer], [again, other] = llm.chat(question), llm.chat([question, [{"role": "user", "content": "Say hello."}]])
    assert "Paris" in answer.outputs[0].text and answer.outputs[0].finish_reason == "stop"
    assert again.outputs == answer.outputs != other.outputs
    assert "".join(llm.stream(question)) == answer.outputs[0].text


def test_the_chat_template_is_that_of_transformers(llm: LLM) -> None:
    """Scripts for vLLM render the prompt themselves, and give it to `generate`."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str) and text.endswith("<|im_start|>assistant\n") and question[0]["content"] in text
    assert not str(tokenizer.apply_chat_template(question, tokenize=False)).endswith("assistant\n")
    [chat] = llm.chat(question, GREEDY)
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert ids == chat.prompt_token_ids
    [generated] = llm.generate([text], GREEDY)
    assert generated.outputs == chat.outputs
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_metrics_of_a_request(llm: LLM) -> None:
    before = time.time()
    [result] = llm.generate("One, two,", GREEDY)
    metrics = result.metrics
    assert metrics is not None and metrics.first_token_time and metrics.last_token_time and metrics.finished_time
    times = [before, metrics.arrival_time, metrics.first_token_time, metrics.last_token_time, metrics.finished_time]
    assert times == sorted(times) and times[-1] <= time.time()
    assert metrics.first_token_latency == metrics.first_token_time - metrics.arrival_time
    assert metrics.num_generation_tokens == len(result.outputs[0].token_ids) == 8


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_token": 8}, "SamplingParams has no parameter 'max_token'; did you mean max_tokens?"),
        ({"temprature": 0.5}, "did you mean temperature?"),
        ({"guided_decoding": None}, "SamplingParams has no parameter 'guided_decoding'; there are "),
    ],
)
def test_a_parameter_that_does_not_exist(values: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError) as caught:
        SamplingParams(**values)
    assert words in str(caught.value)


def test_a_stop_string_ends_text_and_tokens(llm: LLM) -> None:
    [free] = llm.generate("One, two, three,", SamplingParams(temperature=0, max_tokens=16))
    [stopped] = llm.generate("One, two, three,", SamplingParams(temperature=0, max_tokens=16, stop=" five"))
    text = free.outputs[0].text.partition(" five")[0]
    assert text != free.outputs[0].text
    assert (stopped.outputs[0].text, stopped.outputs[0].finish_reason) == (text, "stop")
    assert stopped.outputs[0].token_ids == free.outputs[0].token_ids[: len(stopped.outputs[0].token_ids)]


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, n=2)
    [result] = llm.generate("The capital of France is", params)
    for output in result.outputs:
        assert output.logprobs is not None and output.cumulative_logprob is not None
        chosen = [row[token] for row, token in zip(output.logprobs, output.token_ids, strict=True)]
        assert [entry.rank for entry in chosen] == [1, 1, 1] and [len(row) for row in output.logprobs] == [2, 2, 2]
        assert output.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in chosen))
    assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
    rows = zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True)
    assert all(row is not None and token in row for token, row in rows)


def test_a_schema_holds(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 10**8}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=100, structured_outputs=StructuredOutputsParams(json=schema))
    [result] = llm.chat([{"role": "user", "content": "Paris and its population, as JSON"}], params)
    jsonschema.validate(json.loads(result.outputs[0].text), schema)


def test_vllms_forms(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("The capital of France is")
    results = llm.generate([{"prompt": "The capital of France is"}, {"prompt_token_ids": ids}, ids], GREEDY)
    assert [result.prompt for result in results] == ["The capital of France is", None, None]
    assert results[0].outputs == results[1].outputs == results[2].outputs
    given = {"prompt_token_ids": np.array(ids, np.int32)}
    for prompt in (
        np.array(ids),
        [np.int64(i) for i in ids],
        given,
        torch.tensor(ids),
    ):  # as tokenizers of other libraries give them: one prompt, and several
        for result in (*llm.generate(prompt, GREEDY), *llm.generate([prompt, prompt], GREEDY)):
            assert result.outputs[0].token_ids == results[0].outputs[0].token_ids
    assert len(llm.generate(np.array([ids[:1], ids[:1]]), GREEDY)) == 2
    stop = SamplingParams(temperature=np.float32(0), max_tokens=np.int64(3), stop_token_ids=np.array(ids))  # type: ignore
    assert len(llm.generate(ids, stop)) == 1
    with pytest.raises(ValueError, match="token ids, which are integers"):
        llm.generate(np.array([0.5]), GREEDY)
    each = [SamplingParams(temperature=0, max_tokens=count) for count in (1, 2)]
    assert [len(result.outputs[0].token_ids) for result in llm.generate(["a", "b"], each)] == [1, 2]


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ("", None, "prompt is empty"),
        ([""], None, "prompt is empty"),
        (["fine", ""], None, "prompt is empty"),
        (["", ""], None, "prompt is empty"),
        ("a", SamplingParams(temperature=-1), "temperature is -1"),
        ("a", SamplingParams(max_tokens=10**6), "lower max_tokens to 10"),
        (["a", "b"], [GREEDY], "1 entries for 2 prompts"),
        ([[5, 10**7]], None, "token id 10000000"),
    ],
)
def test_what_is_wrong_is_a_value_error(llm: LLM, prompts: list[str], params: SamplingParams, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate(prompts, params)
    assert llm.generate("still there", GREEDY)[0].finished


def test_a_dictionary_is_no_sampling_params(llm: LLM) -> None:
    wrong: Any = {"temperature": 0}
    with pytest.raises(TypeError, match=r"SamplingParams\(\*\*values\)"):
        llm.generate("a", wrong)


def test_a_stream_that_is_left_early_is_aborted(llm: LLM) -> None:
    for _ in llm.stream("Once", SamplingParams(max_tokens=900, ignore_eos=True)):
        break
    [result] = llm.generate("One", GREEDY)  # the stats of a step arrive with its tokens
    assert result.finished and llm._llm._model.client.stats().running <= 1


def test_embeddings_and_scores() -> None:
    texts = ["a cat", "a kitten", "a lorry"] * 100  # more than the engine gets at a time
    with LLM("all-minilm-l6-v2", threads=1) as llm:
        vectors = [result.outputs.embedding for result in llm.embed(texts)]
        [alone] = llm.embed("a cat")
        assert len(vectors) == 300 and alone.outputs.embedding == pytest.approx(vectors[0], abs=1e-5)
        scores = [result.outputs.score for result in llm.score("a cat", texts)]
        cosines = [sum(a * b for a, b in zip(vectors[0], vector, strict=True)) for vector in vectors]
        assert scores == pytest.approx(cosines, abs=1e-5) and scores[1] > scores[2]
        assert llm.score([], []) == llm.score("a cat", []) == llm.embed([]) == []
        with pytest.raises(ValueError, match="gives vectors, not text: use embed"):
            llm.generate("a")
        with pytest.raises(ValueError, match="input"):
            llm.embed([""])


def test_a_model_that_generates_has_no_embeddings(llm: LLM) -> None:
    with pytest.raises(ValueError, match="generates text and has no embeddings"):
        llm.embed("a")


def test_close_leaves_no_thread_and_no_process() -> None:
    children_before = set(children(os.getpid()))
    before = set(threading.enumerate())
    llm = LLM(str(smollm2()), **SETTINGS)
    assert llm.generate("Hello", GREEDY)[0].finished
    params = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    assert llm.generate("Hello", params)[0].outputs[0].text in ("yes", "no")
    with pytest.raises(ValueError, match="the maximum context length is 1024"):
        llm.generate("a word " * 10_000, GREEDY)  # is tokenised in a process
    assert len(set(children(os.getpid())) - children_before) == 2
    del llm
    gc.collect()
    assert set(children(os.getpid())) <= children_before
    assert {thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()} == set()


def test_asyncio() -> None:
    async def main() -> None:
        async with await AsyncLLM.start(str(smollm2()), **SETTINGS) as llm:

            async def last(prompt: str) -> str:
                text = ""
                async for result in llm.generate(prompt, GREEDY, request_id=prompt):
                    assert result.request_id == prompt and result.outputs[0].text.startswith(text)
                    text = result.outputs[0].text
                return text

            texts = await asyncio.gather(*map(last, PROMPTS))
            assert texts == [await last(prompt) for prompt in PROMPTS]

    asyncio.run(main())


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"did you mean max_model_len\?"):
        LLM(str(smollm2()), max_modl_len=5)
    with pytest.raises(ValueError, match=r"^argument of LLM: trust_remote_code is True, but code"):
        LLM(str(smollm2()), trust_remote_code=True)
    with pytest.raises(ValueError, match=r"^--max-num-seqs \(argument of LLM\) is 0"):
        LLM(str(smollm2()), max_num_seqs=0)
    with pytest.raises(ValueError, match="neither a folder"):
        LLM("not-a-model")


def test_the_library_is_imported_when_it_is_used() -> None:
    code = "import sys, penstock; assert 'penstock.api' not in sys.modules; penstock.LLM; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"  # torch is imported by the engine's thread


def test_a_script_that_fails_shows_its_own_error_alone() -> None:
    script = f"from penstock import LLM\nllm = LLM({str(smollm2())!r}, threads=1)\nraise TypeError('mine')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("TypeError: mine")
    assert done.stderr.count("Traceback") == 1
