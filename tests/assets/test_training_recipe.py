"""The recipe's own parts: what is held out, the schedule, growth, the optimiser, and the end of a function."""

import random
from pathlib import Path

import pytest
import torch
from default_model.corpus import read_corpus
from default_model.evaluation import choose_headers, end_of_function
from default_model.lines import Lines
from default_model.loops import repetitions
from default_model.network import Network, Shape, doubled
from default_model.optimizer import orthogonalise
from default_model.training import Run, Schedule, example, windows
from default_model.vocabulary import load_tokenizer

ASSETS = Path(__file__).parents[2] / "src" / "penstock" / "assets" / "python-8m"


@pytest.fixture
def stdlib(tmp_path: Path) -> Path:
    for name, text in {
        "heapq.py": "held = 'out'\n",
        "test/test_heapq.py": "held = 'out too'\n",
        "json/encoder.py": "def encode(value):\n    return str(value)\n",
        "copy_of_encoder.py": "def encode(value):\n    return str(value)\n",
        "table.py": "codes = [" + "1234, " * 60 + "]\n",
        "broken.py": "def broken(:\n",
        "test/test_json.py": "def test():\n    assert True\n",
        "site-packages/other.py": "licence = 'not ours'\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_corpus_leaves_out_held_out_modules_copies_tables_and_foreign_code(stdlib: Path) -> None:
    documents = read_corpus([stdlib])
    assert [d.path for d in documents] == ["copy_of_encoder.py"]


def test_an_older_library_adds_only_what_is_gone(stdlib: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    older = tmp_path_factory.mktemp("older")
    (older / "copy_of_encoder.py").write_text("older = True\n")
    (older / "gone.py").write_text("gone = True\n")
    (older / "heapq.py").write_text("older = 'held out'\n")
    assert [d.path for d in read_corpus([stdlib, older])] == ["copy_of_encoder.py", "gone.py"]


def test_schedule_warms_up_holds_and_decays_to_zero() -> None:
    schedule = Schedule(1000.0, warmup_s=100.0, decay_share=0.5)
    assert schedule.factor(0.0) == pytest.approx(0.05)
    assert schedule.factor(400.0) == 1.0
    assert schedule.factor(750.0) == pytest.approx(0.5)
    assert schedule.factor(1000.0) == 0.0


def test_schedule_told_to_finish_decays_from_where_it_is() -> None:
    schedule = Schedule(1000.0, warmup_s=100.0, decay_share=0.5)
    schedule.finish_within(750.0, 100.0)
    assert schedule.end_s == 850.0
    assert schedule.factor(750.0) == pytest.approx(0.5)
    assert schedule.factor(800.0) == pytest.approx(0.25)
    assert schedule.factor(850.0) == 0.0


def test_windows_are_pieces_of_the_documents_and_use_every_library_file() -> None:
    library = [torch.arange(start, start + 50) for start in range(0, 1000, 50)]
    source = windows(library, 10, random.Random(0))
    seen: set[int] = set()
    for _ in range(99):
        window = next(source)
        assert len(window) == 11
        seen.update(window.tolist())
    assert {token // 50 for token in seen} == set(range(20))


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 16, 48), (2, 48, 16)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.5 and values.max() < 1.3


def test_growth_doubles_the_layers_and_nearly_keeps_the_function() -> None:
    torch.manual_seed(0)
    small = Network(Shape(hidden=32, layers=2, intermediate=48, heads=2, kv_heads=1, head_dim=16, vocab=64))
    ids = torch.randint(0, 64, (2, 33))
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        grown = doubled(small)
        assert len(grown.model.layers) == 4
        assert grown(ids).sub(small(ids)).abs().max() < 0.05 * small(ids).abs().max()


def test_a_run_continues_from_its_checkpoint_exactly(tmp_path: Path) -> None:
    from default_model.network import Shape

    shape = Shape(hidden=32, layers=2, intermediate=48, heads=2, kv_heads=1, head_dim=16, vocab=64)
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (2, 17))
    with torch.compiler.set_stance("force_eager"):
        run = Run(shape, muon_lr=0.02, adam_lr=3e-3)
        for _ in range(2):
            run.count(run.train_step(ids, ids, torch.ones(2, 17), 1.0, None), 1.0)
        run.grow()
        run.count(run.train_step(ids, ids, torch.ones(2, 17), 1.0, None), 1.0)
        run.save(tmp_path / "run.safetensors")
        resumed = Run(shape, muon_lr=0.02, adam_lr=3e-3)
        resumed.restore(tmp_path / "run.safetensors")
        assert (resumed.step, resumed.tokens, resumed.is_full_depth) == (run.step, run.tokens, True)
        for _ in range(2):
            assert resumed.train_step(ids, ids, torch.ones(2, 17), 1.0, None) == run.train_step(
                ids, ids, torch.ones(2, 17), 1.0, None
            )


@pytest.mark.parametrize(
    ("completion", "column", "kept"),
    [
        ("\n    return 1\n\n\ndef g", 0, "\n    return 1\n\n\n"),
        ("\n        x = 1\n    def g", 4, "\n        x = 1\n"),
        ("\n    x = 1\n    ", 0, None),
        ("  # why\n    return 1\nx", 0, "  # why\n    return 1\n"),
    ],
)
def test_a_function_ends_before_the_first_dedented_line(completion: str, column: int, kept: str | None) -> None:
    end = end_of_function(completion, column)
    assert (completion[:end] if end is not None else None) == kept


def test_headers_take_the_first_ordinary_functions_of_each_module_in_turn() -> None:
    body = "    x = 1\n    y = 2\n    return x + y\n"
    sources = {
        "a": (
            "import os\n\ndef short():\n    return 1\n\n"
            f"def first(x,\n          y):\n{body}\ndef second():\n    '''Doc.'''\n{body}"
        ),
        "b": "class C:\n" + "".join(f"    {line}\n" for line in f"def method(self):\n{body}".splitlines()),
    }
    headers = choose_headers(sources)
    assert [(h.module, h.name, h.column) for h in headers] == [
        ("a", "first", 0),
        ("b", "method", 4),
        ("a", "second", 0),
    ]
    assert headers[0].prompt.endswith("def first(x,\n          y):")
    assert headers[1].prompt[headers[1].start :] == "    def method(self):"
    assert headers[2].prompt.endswith("'''Doc.'''")


SOURCE = """class C:
    def one(self):
        if self:
            return 1

    def two(
        self,
    ):
        return 2


x = 3
"""


def test_functions_are_found_in_tokens() -> None:
    tokenizer = load_tokenizer(ASSETS)
    lines, ids = Lines.of(tokenizer), tokenizer.encode(SOURCE).ids
    bodies = [tokenizer.decode(ids[place:]) for place, _ in lines.headers(ids)]
    assert [body.split("\n")[1].strip() for body in bodies] == ["if self:", "return 2"]
    assert [indent for _, indent in lines.headers(ids)] == [4, 4]
    for (place, indent), rest in zip(lines.headers(ids), ("def two", "x = 3"), strict=True):
        assert tokenizer.decode(ids[place + lines.end(ids[place:], indent) :]).strip().startswith(rest)
    assert [tokenizer.decode(ids[place:]).strip()[:5] for place in lines.endings(ids)] == ["def t", "x = 3"]


def test_where_a_function_ends_counts_more() -> None:
    tokenizer = load_tokenizer(ASSETS)
    window = torch.tensor(tokenizer.encode(SOURCE).ids)
    ids, targets, weights = example(window, Lines.of(tokenizer), 3.0)
    assert torch.equal(ids, window[:-1]) and torch.equal(targets, window[1:])
    heavy = [tokenizer.decode([token]) for token in targets[weights == 3.0].tolist()]
    assert heavy == ["\n\n    ", "\n\n\n"] and (weights == 1.0).sum() == len(weights) - 2


def test_a_repetition_is_a_gram_that_stood_before() -> None:
    line = list(range(10))
    assert repetitions(line) == []
    assert repetitions([*line, 99, *line]) == [16, 17, 18, 19, 20]


@torch.compiler.set_stance("force_eager")  # compiling takes a hundred times as long
def test_completing_with_a_cache_is_completing_without() -> None:
    torch.manual_seed(0)
    network = Network(Shape(hidden=32, layers=2, intermediate=48, heads=2, kv_heads=1, head_dim=16, vocab=97))
    ids = torch.randint(97, (3, 7))
    completed = network.complete(ids, 5)
    assert torch.equal(completed[:, :7], ids)
    for length in range(7, 12):
        assert torch.equal(completed[:, length], network(completed[:, :length])[:, -1].argmax(-1))
