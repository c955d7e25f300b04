"""How a text is split into pieces before byte-level BPE merges tokens, for the names in `tokenizer.ggml.pre`.

The patterns are those of llama.cpp (`llm_tokenizer_bpe` in llama-vocab.cpp, July 2026) in the dialect of Oniguruma.
llama.cpp matches some patterns on general categories instead of characters: cased letters are then letters, and
letters beyond ASCII have both cases. The patterns here give the same pieces.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple


class PreTokenizer(NamedTuple):
    """Patterns in order: each splits the pieces of the one before. Text between matches of a pattern is a piece as
    well."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a piece that is a token is not built by merges
    adds_bos: bool = False  # unless the file says otherwise


_SHORT_FORM = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"  # 's, 't, 're …
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_ENDS = r"\s+(?!\S)|\s+"
_SPACES = rf"\s*[\r\n]+|{_ENDS}"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_ENDS}"
_QWEN2 = rf"{_SHORT_FORM}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_LLAMA3 = rf"{_SHORT_FORM}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = (
    rf"{_SHORT_FORM}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_JAIS2 = rf"{_SHORT_FORM}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+|" + "|".join(
    [*(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)", r"\s"]
)
_BAILING = rf"{_SHORT_FORM}|{_WORD}|\p{{N}}|{_SYMBOLS}|\s*[\r\n]|{_ENDS}"
_SEED = rf"{_SHORT_FORM}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_NO_SHORT_FORMS = rf"{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_MINICPM5 = rf"{_SHORT_FORM}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_SPACES}"
_EXAONE_MOE = (
    rf"{_SHORT_FORM}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_ENDS}"
)
# Words that end where an upper-case letter follows a lower-case one, as in camelCase.
_TAIL = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_UPPER_WORD, _LOWER_WORD = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{a}{_LOWER}{b}" for a, b in (("+", "*"), ("*", "+")))
_TEKKEN = rf"{_LOWER_WORD}|{_UPPER_WORD}|\p{{N}}|{_TAIL}"
_GPT4O = rf"{_LOWER_WORD}(?:{_SHORT_FORM})?|{_UPPER_WORD}(?:{_SHORT_FORM})?|\p{{N}}{{1,3}}|{_TAIL}"
_MARKED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+(?:{_SHORT_FORM})?"
_TINY_AYA = rf"{_MARKED_WORD}|\p{{N}}{{1,3}}|{_TAIL}"
_YOUTU = rf"{_MARKED_WORD}|\p{{N}}|{_TAIL}"
_THREES_FROM_THE_RIGHT = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # the first with the text before it
_CJK = r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
_CJK_PUNCTUATION = r"[\uFF01\u2026\u201C\u201D\u2018\u2019\u2014\uFF1A\uFF1B\uFF0C\u3001-\u303F\uFE30-\uFE4F]+"
_HANGUL, _BOPOMOFO = r"[\uAC00-\uD7A3\u3131-\u318E]+", r"[\u3105-\u312F]+"
_SOUTHEAST_ASIAN = (
    r"[\u4E00-\u9FFF\u3400-\u4DBF\u8C48-\uFAFF\u3040-\u309F\u30A0-\u30FF\uFF65-\uFF9F\u2F00-\u2FDF\u0E40-\u0E7F"
    r"\u0E80-\u0EFF\u1780-\u17FF\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF\uAC00-\uD7AF\u1100-\u11FF]+"
)
_ASCII_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]\^_`{|}~][A-Za-z]+"
_LETTERS_AND_MARKS = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = rf"{_ASCII_WORD}|{_LETTERS_AND_MARKS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_SPARK = rf"{_ASCII_WORD}|{_LETTERS_AND_MARKS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_ENDS}"
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uFF0C\u3001\u0964\u06D4\u060C)]+"
_EAST_ASIAN = r"[[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]&&[^\s]]+"
# deepseek-llm lists the letters with a case, as Unicode 11 has them, without those of mathematics.
_CASED_LETTERS = (
    r"\s?[A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293\u0295-\u02AF\u0370-\u0373"
    r"\u0376\u0377\u037B-\u037D\u037F\u0386\u0388-\u038A\u038C\u038E-\u03A1\u03A3-\u03F5\u03F7-\u0481\u048A-\u052F"
    r"\u0531-\u0556\u10A0-\u10C5\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77"
    r"\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D\u1F20-\u1F45\u1F48-\u1F4D\u1F50-\u1F57\u1F59\u1F5B\u1F5D\u1F5F-\u1F7D"
    r"\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE\u1FC2-\u1FC4\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC\u1FF2-\u1FF4"
    r"\u1FF6-\u1FFC\u2102\u2107\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-\u212D\u212F-\u2134\u2139"
    r"\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184\u2C00-\u2C7B\u2C7E-\u2CE4\u2CEB-\u2CEE\u2CF2\u2CF3\uA640-\uA66D"
    r"\uA680-\uA69B\uA722-\uA76F\uA771-\uA787\uA78B-\uA78E\uAB70-\uABBF\uFB00-\uFB06\uFB13-\uFB17\uFF21-\uFF3A"
    r"\uFF41-\uFF5A\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}"
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+"
)
_WIDE_PUNCTUATION = r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3001-\u3002]+"
_LINE_ENDS = r"[\r\n]"
_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"

_KINDS: Final = (
    ("default", PreTokenizer((r"[\p{P}$+<=>\^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4",
        PreTokenizer((_GPT2,)),
    ),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer((_DIGIT, _GPT2)),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True),
    ),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), whole_words=True)),
    ("chatglm-bpe dbrx smaug-bpe", PreTokenizer((_LLAMA3,))),
    (
        "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("tekken", PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    (
        "deepseek-llm",
        PreTokenizer((_LINE_ENDS, _CASED_LETTERS, _WIDE_PUNCTUATION, r"\s+$", _EAST_ASIAN, r"\p{N}+")),
    ),
    ("deepseek-coder", PreTokenizer((_LINE_ENDS, r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, _DIGIT))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer((_THREE_DIGITS, _CJK, _DEEPSEEK3))),
    ("spark2_5", PreTokenizer((_THREE_DIGITS, _CJK, _SPARK, _DIGIT))),
    ("falcon", PreTokenizer((r"[\p{P}$+<=>\^~|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, _DIGIT))),
    ("jais-2", PreTokenizer((_JAIS2,))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("seed-coder", PreTokenizer((_SEED,))),
    ("ufakzeka", PreTokenizer((_NO_SHORT_FORMS,))),
    ("minicpm5", PreTokenizer((_THREE_DIGITS, _MINICPM5), whole_words=True)),
    ("exaone-moe", PreTokenizer((_EXAONE_MOE,))),
    ("laguna", PreTokenizer((r"[^\n]+|\n+", _QWEN2))),
    ("tiny_aya cohere2moe", PreTokenizer((_THREES_FROM_THE_RIGHT, _TINY_AYA))),
    ("afmoe", PreTokenizer((_THREES_FROM_THE_RIGHT, _SOUTHEAST_ASIAN, _DEEPSEEK3))),
    (
        "youtu",
        PreTokenizer((f"{_HANGUL}|{_CJK_PUNCTUATION}|{_BOPOMOFO}|{_CJK}", _YOUTU), whole_words=True),
    ),
    (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "IMGIMG[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                _DIGIT,
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            adds_bos=True,
        ),
    ),
)

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {name: kind for names, kind in _KINDS for name in names.split()}
