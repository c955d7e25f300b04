"""Every chain of decoder steps that is taken gives, token by token, what the library makes of the whole."""

import json
import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from penstock.text import Detokenizer, Tokenizer, TokenizerError
from penstock.text.special_tokens import SpecialTokens

VOCABULARY = ["▁", "▁▁a", "b▁", "c", " ", " d", "__", "Ġe", "é", "<0x20>", "<0x41>", "<0xZZ>", "<s>"]

CHAINS = {
    "none": None,
    "byte level": decoders.ByteLevel(),
    "byte level in a sequence": decoders.Sequence([decoders.ByteLevel()]),
    "metaspace": decoders.Metaspace(),
    "metaspace that adds no prefix": decoders.Metaspace(prepend_scheme="never"),
    "metaspace of another mark": decoders.Metaspace(replacement="_"),
    "replace": decoders.Replace("▁", " "),
    "byte fallback": decoders.ByteFallback(),
    "two replaced": decoders.Sequence([decoders.Replace("▁", " "), decoders.Replace("_", ""), decoders.Fuse()]),
    "strip": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0)]),
    "strip of another character": decoders.Sequence([decoders.Fuse(), decoders.Strip("_", 1, 0)]),
    "metaspace and strip": decoders.Sequence([decoders.Metaspace(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    "nested": decoders.Sequence(
        [decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()]), decoders.Fuse()]
    ),
}


def tokenizer_with(decoder: decoders.Decoder | None) -> tuple[Tokenizer, Backend]:
    backend = Backend(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="c"))
    backend.add_special_tokens(["<s>"])
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend, SpecialTokens({}, [], []), None), backend


@pytest.mark.parametrize("name", CHAINS)
def test_pieces_make_the_text_of_the_whole(name: str) -> None:
    tokenizer, backend = tokenizer_with(CHAINS[name])
    draw = random.Random(name)
    for _ in range(400):
        ids = [draw.randrange(len(VOCABULARY) + 1) for _ in range(draw.randrange(7))]
        for skip in (True, False):
            detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=skip)
            text = "".join([*(detokenizer.push(i) for i in ids), detokenizer.flush()])
            assert text == backend.decode(ids, skip_special_tokens=skip), [VOCABULARY[i] for i in ids]


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (decoders.BPEDecoder(), "BPEDecoder cannot be streamed"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Fuse \\+ Strip, of which Strip cannot"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0)]), "Strip cannot be streamed"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Replace("a", "b")]), "Replace cannot be streamed"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]), "Replace cannot be streamed"),
    ],
)
def test_a_chain_whose_text_depends_on_what_follows_is_refused(decoder: decoders.Decoder, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        tokenizer_with(decoder)


def test_a_regular_expression_is_refused() -> None:
    _, backend = tokenizer_with(None)
    saved = json.loads(backend.to_str())
    saved["decoder"] = {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}
    with pytest.raises(TokenizerError, match="only strings are supported"):
        Tokenizer(Backend.from_str(json.dumps(saved)), SpecialTokens({}, [], []), None)
