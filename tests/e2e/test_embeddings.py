"""Embeddings, scores and labels from real servers, with clients that we did not write."""

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cohere
import numpy as np
import ollama
import openai
import pytest
import torch

from tests.e2e.server import Server, gauge, serving
from tests.encoders import add_roberta_tokenizer, add_tokenizer, minilm, tiny_encoder

TEXTS = ["A penstock is a pipe.", "The pipe that feeds a turbine.", "My dog is brown.", "x"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving(log, "--max-num-seqs", "4", "--served-model-name", "minilm", model="all-minilm-l6-v2") as running:
        yield running


@pytest.fixture(scope="module")
def exact() -> np.ndarray:
    """The embeddings by transformers."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(minilm()), AutoTokenizer.from_pretrained(minilm())
    rows = []
    for text in TEXTS:
        with torch.inference_mode():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        rows.append((mean / mean.norm()).numpy())
    return np.stack(rows)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


def test_a_server_that_cuts_long_texts(tmp_path: Path) -> None:
    """The chunks of LlamaIndex have up to 1024 tokens, and its client sends no parameter that cuts them."""
    with serving(tmp_path / "log", "--truncate-embeddings", model="all-minilm-l6-v2") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)
        answer = client.embeddings.create(model="all-minilm-l6-v2", input=["x " * 1024, "x " * 254])
        whole, cut = (np.array(each.embedding) for each in answer.data)
        assert np.abs(whole - cut).max() < 1e-6
        assert answer.usage.prompt_tokens == 2 * 256
        scored = server.post("/score", {"text_1": "x", "text_2": ["x " * 1024]}).json()
        assert scored["usage"]["prompt_tokens"] == 3 + 256
        own = client.embeddings.create(
            model="all-minilm-l6-v2", input="x " * 1024, extra_body={"truncate_prompt_tokens": 9}
        )
        assert own.usage.prompt_tokens == 9  # a request's own number comes first


class TestOpenAI:
    @pytest.mark.parametrize("encoding", ["float", "base64", None])
    def test_the_embeddings_of_transformers_in_order(
        self, client: openai.OpenAI, exact: np.ndarray, encoding: str | None
    ) -> None:
        given = {} if encoding is None else {"encoding_format": encoding}
        answer = client.embeddings.create(model="minilm", input=TEXTS, **given)  # type: ignore[arg-type]
        assert [each.index for each in answer.data] == [0, 1, 2, 3]
        rows = [
            np.frombuffer(base64.b64decode(e.embedding), "<f4") if isinstance(e.embedding, str) else e.embedding
            for e in answer.data
        ]
        assert np.abs(np.array(rows) - exact).max() < 1e-4
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 8 + 10 + 7 + 3

    def test_texts_token_ids_and_lists_of_either(self, client: openai.OpenAI, server: Server) -> None:
        ids = [server.post("/tokenize", {"prompt": text}).json()["tokens"] for text in TEXTS[:2]]
        rows = [
            [each.embedding for each in client.embeddings.create(model="minilm", input=given).data]
            for given in (TEXTS[0], [TEXTS[0]], ids[0], [ids[0]], TEXTS[:2], ids)
        ]
        for given in rows:
            assert np.abs(np.array(given[0]) - np.array(rows[0][0])).max() < 1e-6
        assert np.abs(np.array(rows[4][1]) - np.array(rows[5][1])).max() < 1e-6

    def test_fewer_dimensions_have_length_1_again(self, client: openai.OpenAI, exact: np.ndarray) -> None:
        (row,) = client.embeddings.create(model="minilm", input=TEXTS[0], dimensions=100).data
        wanted = exact[0, :100] / np.linalg.norm(exact[0, :100])
        assert np.abs(np.array(row.embedding) - wanted).max() < 1e-4

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"input": []}, "input is empty"),
            ({"input": ""}, "input is empty"),
            ({"input": ["a", ""]}, "input[1] is empty"),
            ({"input": ["a", 1]}, "input mixes"),
            ({"input": [[]]}, "input is empty"),
            ({"input": [30522]}, "ids of 'minilm' are 0 to 30521"),
            ({"input": ["a"] * 2049}, "2049 texts; the limit is 2048"),
            ({"input": "x " * 300}, "the maximum length is 256 tokens, but input has 302"),
            ({"input": [7] * 257}, "the maximum context length is 256"),
            ({"input": "a", "dimensions": 385}, "from 1 to 384"),
            ({"input": "a", "priority": -2147483647}, "from -10 to 10"),
            ({"input": "a", "encoding_format": "int8"}, "float or base64"),
            ({"input": "a", "prompt_name": "query"}, "the model's are: none"),
            ({"input": "a", "timeout": 0}, "timeout is 0; it must be above 0"),
            ({"input": "a", "truncate_prompt_tokens": 2}, "cannot be cut off; the limit is 2"),
        ],
    )
    def test_bad_input_is_refused(self, server: Server, fields: dict[str, object], words: str) -> None:
        answer = server.post("/v1/embeddings", {"model": "minilm", **fields})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text

    def test_a_long_text_is_cut_if_asked(self, client: openai.OpenAI) -> None:
        long, cut = (
            client.embeddings.create(model="minilm", input=text, extra_body={"truncate_prompt_tokens": -1})
            for text in ("x " * 300, "x " * 254)
        )
        assert long.usage.prompt_tokens == 256
        assert np.abs(np.array(long.data[0].embedding) - np.array(cut.data[0].embedding)).max() < 1e-6

    def test_the_error_of_a_long_text_names_every_remedy(self, client: openai.OpenAI) -> None:
        remedy = "set truncate_prompt_tokens to -1, or start the server with --truncate-embeddings"
        with pytest.raises(openai.BadRequestError, match=remedy):
            client.embeddings.create(model="minilm", input="x " * 300)

    def test_the_model_generates_nothing(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="embeds texts and generates none; use /v1/embeddings"):
            client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.BadRequestError, match="embeds texts"):
            client.completions.create(model="minilm", prompt="hi")

    def test_many_texts_and_the_metrics(self, client: openai.OpenAI, server: Server) -> None:
        texts = [f"number {i} " * (i % 17 + 1) for i in range(300)]
        before = gauge(server.get("/metrics").text, "penstock_prompt_tokens_total")
        answer = client.embeddings.create(model="minilm", input=texts)
        assert len({tuple(each.embedding[:4]) for each in answer.data}) == 300
        after = gauge(server.get("/metrics").text, "penstock_prompt_tokens_total")
        assert after - before == answer.usage.prompt_tokens


def test_rerank_by_cosine(server: Server, exact: np.ndarray) -> None:
    client = cohere.ClientV2(api_key="unused", base_url=server.url)
    answer = client.rerank(model="minilm", query=TEXTS[0], documents=TEXTS[1:], top_n=2)
    cosines = exact[1:] @ exact[0]
    assert [each.index for each in answer.results] == np.argsort(-cosines)[:2].tolist()
    assert abs(answer.results[0].relevance_score - cosines.max()) < 1e-4
    assert server.post("/classify", {"input": "x"}).json()["message"].startswith("model 'minilm' gives embeddings")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": TEXTS}),
        ("/v2/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}),
        ("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}),
        ("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}),
    ],
)
def test_a_timeout_holds(server: Server, path: str, fields: dict[str, object]) -> None:
    late = server.post(path, {**fields, "timeout": 1e-5})
    assert late.status_code == 504 and "deadline_exceeded" in late.text
    assert server.post(path, {**fields, "timeout": 60}).status_code == 200


def test_a_reranker_of_xlm_roberta(tmp_path: Path) -> None:
    """The order and the scores are transformers'."""
    from transformers import PreTrainedTokenizerFast

    folder, documents = tmp_path / "ranker", [*TEXTS, "Rain fills the lake.", "turbine?", "0123"]
    model = tiny_encoder("xlm_roberta_label")
    model.save_pretrained(folder)
    add_roberta_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    with torch.inference_mode():
        pairs = [tokenizer(TEXTS[1], each, return_tensors="pt", return_token_type_ids=False) for each in documents]
        wanted = np.array([torch.sigmoid(model(**pair).logits[0, 0]).item() for pair in pairs])
    assert np.diff(np.sort(wanted)).min() > 1e-4
    with serving(tmp_path / "log", "--dtype", "float32", model=str(folder)) as server:
        client = cohere.ClientV2(api_key="unused", base_url=server.url)
        results = client.rerank(model="ranker", query=TEXTS[1], documents=documents).results
    order = np.argsort(-wanted)
    assert [each.index for each in results] == order.tolist()
    assert np.abs(np.array([each.relevance_score for each in results]) - wanted[order]).max() < 1e-5


class TestClassifier:
    """A tiny random cross-encoder, against transformers."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder: Path = tmp_path_factory.mktemp("models") / "ranker"
        model = tiny_encoder("bert_labels")
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        weights = model.classifier
        # One label: the logits of the first.
        weights.weight.data, weights.bias.data = weights.weight.data[:1], weights.bias.data[:1]
        model.config.id2label = {0: "fits"}
        config |= {"id2label": {"0": "fits"}, "label2id": {"fits": 0}}
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        add_tokenizer(folder)
        return folder

    @pytest.fixture(scope="class")
    def server(self, folder: Path) -> Iterator[Server]:
        with serving(folder.parent / "log", model=str(folder)) as running:
            yield running

    @pytest.fixture(scope="class")
    def wanted(self, folder: Path) -> np.ndarray:
        """The sigmoid of the pairs' logits."""
        from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

        model = AutoModelForSequenceClassification.from_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        scores = []
        for text in TEXTS:
            encoded = tokenizer(TEXTS[2], text, return_tensors="pt", return_token_type_ids=True)
            assert encoded["token_type_ids"].sum() > 0
            with torch.inference_mode():
                scores.append(torch.sigmoid(model(**encoded).logits[0, 0]).item())
        return np.array(scores)

    def test_cohere(self, server: Server, wanted: np.ndarray) -> None:
        order = np.argsort(-wanted).tolist()
        for client in (
            cohere.ClientV2(api_key="unused", base_url=server.url),
            cohere.Client(api_key="unused", base_url=server.url),
        ):
            answer = client.rerank(model="ranker", query=TEXTS[2], documents=TEXTS)
            assert [each.index for each in answer.results] == order
            assert np.abs(np.array([each.relevance_score for each in answer.results]) - wanted[order]).max() < 1e-5

    def test_jina(self, server: Server, wanted: np.ndarray) -> None:
        body = {"query": TEXTS[2], "documents": [{"text": text} for text in TEXTS], "top_n": 1}
        (best,) = server.post("/rerank", body).json()["results"]
        assert best["document"]["text"] == TEXTS[best["index"]] and best["index"] == wanted.argmax()
        assert "document" not in server.post("/v1/rerank", {**body, "return_documents": False}).json()["results"][0]

    def test_score_and_classify(self, server: Server, wanted: np.ndarray) -> None:
        answer = server.post("/score", {"text_1": TEXTS[2], "text_2": TEXTS}).json()
        assert np.abs(np.array([each["score"] for each in answer["data"]]) - wanted).max() < 1e-5
        (label,) = server.post("/classify", {"input": TEXTS[0]}).json()["data"]
        assert label["label"] == "fits" and label["num_classes"] == 1 and 0 < label["probs"][0] < 1
        refused = server.post("/v1/embeddings", {"input": "x"})
        assert refused.status_code == 400 and "is a classifier" in refused.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("path", "body", "words"),
        [
            ("/rerank", {"query": "", "documents": ["a"]}, "query is empty"),
            ("/rerank", {"query": "a", "documents": []}, "documents is empty"),
            ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n is 0"),
            ("/rerank", {"query": "a " * 200, "documents": ["b"]}, "cannot be cut off; the limit is 160"),
            ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 has 2 texts and text_2 has 3"),
            ("/classify", {"input": []}, "input is empty"),
        ],
    )
    def test_bad_input_is_refused(self, server: Server, path: str, body: dict[str, object], words: str) -> None:
        answer = server.post(path, body)
        assert answer.status_code == 400 and words in answer.json()["message"], answer.text

    def test_a_long_document_is_cut(self, server: Server) -> None:
        long, cut = (
            server.post("/rerank", {"query": "a", "documents": [text]}).json()["results"][0]["relevance_score"]
            for text in ("b " * 500, "b " * 156)
        )
        assert abs(long - cut) < 1e-6


def test_the_command(exact: np.ndarray) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "embed", "--threads", "1", "all-minilm-l6-v2"],
        input="\n".join(TEXTS),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    rows = np.array([json.loads(line) for line in done.stdout.splitlines()])
    assert np.abs(rows - exact).max() < 1e-4


class TestOllama:
    def test_the_embeddings_of_transformers_in_order(self, server: Server, exact: np.ndarray) -> None:
        client = ollama.Client(host=server.url)
        answer = client.embed("minilm", TEXTS)
        assert np.abs(np.array(answer.embeddings) - exact).max() < 1e-4 and answer.prompt_eval_count == 28
        assert np.abs(np.array(client.embed("minilm:latest", TEXTS[0]).embeddings[0]) - exact[0]).max() < 1e-4
        short = np.array(client.embed("minilm", TEXTS[0], dimensions=100).embeddings[0])
        assert np.abs(short - exact[0, :100] / np.linalg.norm(exact[0, :100])).max() < 1e-4
        assert np.abs(np.array(client.embeddings("minilm", TEXTS[1]).embedding) - exact[1]).max() < 1e-4
        assert client.show("minilm").capabilities == ["embedding"]

    def test_long_texts_are_cut_unless_the_client_forbids_it(self, server: Server) -> None:
        client, text = ollama.Client(host=server.url), "water " * 3000
        assert client.embed("minilm", text).prompt_eval_count < 1000
        with pytest.raises(ollama.ResponseError, match="the maximum length is"):
            client.embed("minilm", text, truncate=False)
        with pytest.raises(ollama.ResponseError, match="dimensions is 9999; it must be from 1 to 384"):
            client.embed("minilm", "x", dimensions=9999)
