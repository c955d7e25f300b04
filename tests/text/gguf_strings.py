"""Texts on which tokenizers differ if anything in them does, drawn from a seed. Only the standard library is needed.

All characters were in Unicode 14, or are in no version: later ones are letters to some libraries and not to others.
"""

import random
from collections.abc import Callable, Sequence
from functools import lru_cache

COUNT = 10_000  # texts for each vocabulary
SEED = 16
_MOST_PARTS = 9

_ALPHABETS = (
    *("abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "aeiouAEIOUßæøåÆØÅéèêçñüöäÜÖÄłŁšžčďťőűİıſ"),
    *(
        "αβγδεζηθικλμνξοπρστυφχψωΑΒΓΔάέήίόύώ",
        "абвгдежзийклмнопрстуфхцчшщъыьэюяАБВГДЁїєґ",
        "აბგდევზთიკლმნო",
        "աբգդեզէըթժիլխ",
    ),
    *("אבגדהוזחטיכלמנסעפצקרשת", "ابتثجحخدذرزسشصضطظعغفقكلمنهوي", "अआइईउकखगघचछजटठडतथदनपबमयरलवशषसह", "কখগঘচছজঝটঠডঢণতথদধন"),
    *("กขคงจฉชซญดตถทนบปผพฟมยรลวสหอฮ", "அஆஇஈகஙசஞடணதநபமயரல", "ሀለሐመሠረሰሸቀበተ", "ᎠᎡᎢᎣᎤᎥᎦᎧ", "កខគឃងចឆជ"),
    *(
        "가각간갇갈나다라마바사아자차카타파하한글",
        "ㄱㄴㄷㅏㅑㅓ",
        "あいうえおかきくけこさしすせそ",
        "アイウエオカキクケコガギグ",
        "ㄅㄆㄇㄈ",
    ),
    *("的一是不了人我在有他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生", "𠀀𠀁𠮷𡃁𪚥", "㐀㐁㐂䶵"),
    *("𝐀𝐁𝒶𝓫𝕏𝖟", "ªºʔʘʰˠːˑ", "ⅠⅡⅢⅣⅷↁↂ", "²³¹½¾⁴⁵₆₇", "٠١٢٣٤٥٦", "०१२३४५", "０１２３４５"),
    *("𐐀𐐁𐐨𐐩", "ⰀⰁⰂⰰⰱ", "ｱｲｳｴｵ", "ＡＢＣａｂｃ", "ᏸᏹꭰꭱ", "ῼῳᾼᾳ", "ǅǈǋǲ", "ﬀﬁﬂﬃ", "ℂℍℕΩKÅ", "ꙀꙁꚀꚁ"),
)
_MARKS = (
    "\u0301\u0300\u0308\u0327\u0323\u0338\u20dd\u0485\u05b0\u05b4\u064b\u0651\u093e\u094d\u093f\u0e31\u0e38\u3099\ufe0f"
    "\ufe0e"
)
_EMOJI = (
    *(
        "🙂",
        "😀",
        "🤖",
        "👍🏽",
        "👩‍👩‍👧‍👦",
        "👨🏿‍🚀",
        "🏳️‍🌈",
        "🇩🇪",
        "🇺🇳🇫",
        "1️⃣",
        "#️⃣",
        "❤️",
        "☃",
        "✅",
        "🫠",
        "🧑🏻‍❤️‍💋‍🧑🏼",
        "🏴󠁧󠁢󠁳󠁣󠁴󠁿",
        "©️",
        "™",
    ),
)
_BLANKS = (
    " ",
    "\t",
    "\n",
    "\r\n",
    "\r",
    "\u00a0",
    "\u3000",
    "\u2003",
    "\u202f",
    "\u1680",
    "\v",
    "\f",
    "\x85",
    "\u2028",
)
_ODD = (
    *(
        "\x00",
        "\x01",
        "\x1b[31m",
        "\x7f",
        "\x80",
        "\x9f",
        "\xad",
        "\u200b",
        "\u200c",
        "\u200d",
        "\u200e",
        "\u202e",
        "\u2060",
    ),
    *("\ufeff", "\ufffd", "\uffff", "\ufdd0", "\ue000", "\uf8ff", "\U000f0000", "\U0010ffff", "\u0378", "\U0001fffe"),
    *("\U000e0041", "\ufff9", "\U000e0100"),
)
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡¿§¶«»‘’“”…–—·•、。「」（）！？，：；～‰€£¥₿→⇒∑√≠±×÷°¬¦"
_WORDS = (
    *(
        "the",
        "of",
        "and",
        "Hello",
        "world",
        "tokenizer",
        "It",
        "isn",
        "WE",
        "camelCase",
        "HTTPServer",
        "snake_case",
        "naïve",
    ),
    *(
        "antidisestablishmentarianism",
        "Größe",
        "über",
        "cliché",
        "łódź",
        "I",
        "a",
        "GPT",
        "iPhone",
        "O'Reilly",
        "rock'n'roll",
    ),
)
_SHORT_FORMS = (
    "'s",
    "'t",
    "'re",
    "'ve",
    "'m",
    "'ll",
    "'d",
    "'S",
    "'LL",
    "'Re",
    "’s",
    "'ſ",
    "'sx",
    "'",
    "''",
    "'n'",
    "'K",
)
_CODE = (
    *(
        "def f(x):\n    return x**2\n",
        "for (int i = 0; i < n; ++i) {\n\ta[i] += 0x1F;\n}\n",
        "</div>\n  <br/>",
        "a&&b||!c",
    ),
    *(
        "SELECT * FROM t WHERE id=42;--",
        "https://example.com/a?b=c&d=%20#e",
        "#include <stdio.h>\r\n",
        "${HOME}/.bashrc",
    ),
    *(
        '{"key": [1, 2.5e-3, null]}',
        "x -= y<<3;",
        "/* ***** */",
        "// ======",
        "\\n\\t\\u00e9",
        "fn main() -> Result<(), E> {",
        "==>",
    ),
)
_MIMICS = (
    *(
        "<s>",
        "</s>",
        "<unk>",
        "<pad>",
        "<bos>",
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "[INST]",
        "[/INST]",
    ),
    *(
        "<0x0A>",
        "<0xFF>",
        "▁",
        "▁▁",
        "Ġ",
        "Ċ",
        "ĠĠ",
        "Ã©",
        "<|",
        "|>",
        "<think>",
        "</think>",
        "<start_of_turn>",
        "[UNK]",
    ),
    *("<｜end▁of▁sentence｜>", "<|user|>", "<fim_prefix>", "<mask>"),
)


def texts(special: Sequence[str], count: int = COUNT, seed: int = SEED) -> list[str]:
    """The first `count` texts of a seed. `special` are the vocabulary's special tokens; some texts contain them."""
    return list(_texts(tuple(special), count, seed))


@lru_cache(8)
def _texts(special: tuple[str, ...], count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(_part(draw, special) for _ in range(_parts(draw))) for _ in range(count)]


def _parts(draw: random.Random) -> int:
    return 0 if draw.random() < 0.01 else draw.randrange(1, _MOST_PARTS + 1)


def _part(draw: random.Random, special: Sequence[str]) -> str:
    text = draw.choices(_PARTS, _WEIGHTS)[0](draw)
    if special and draw.random() < 0.08:
        token = draw.choice(special)
        text += token if draw.random() < 0.8 else token[: draw.randrange(1, len(token) + 1)]
    return text


def _letters(draw: random.Random) -> str:
    alphabet = draw.choice(_ALPHABETS)
    return "".join(draw.choices(alphabet, k=draw.randrange(1, 12)))


def _mixed_letters(draw: random.Random) -> str:
    return "".join(draw.choice(draw.choice(_ALPHABETS)) for _ in range(draw.randrange(1, 8)))


def _words(draw: random.Random) -> str:
    return draw.choice((" ", "", "  ")) + " ".join(draw.choices(_WORDS, k=draw.randrange(1, 7)))


def _marked(draw: random.Random) -> str:
    letters = draw.choice(_ALPHABETS)
    return "".join(
        draw.choice(letters) + "".join(draw.choices(_MARKS, k=draw.randrange(3))) for _ in range(draw.randrange(1, 7))
    )


def _blanks(draw: random.Random) -> str:
    kinds = draw.choice((" ", "\n", "\t", "\r\n", (" ", "\n"), _BLANKS[:5], _BLANKS))
    return "".join(draw.choice(kinds) for _ in range(draw.choice((1, 1, 2, 3, 4, 5, 7, 9, 17, 33, 70))))


def _digits(draw: random.Random) -> str:
    digits = "".join(draw.choices("0123456789", k=draw.randrange(1, 14)))
    return draw.choice(("", " ", "$", "-", "1,234.")) + digits


def _punctuation(draw: random.Random) -> str:
    if draw.random() < 0.4:
        return draw.choice(_PUNCTUATION) * draw.randrange(1, 40)
    return "".join(draw.choices(_PUNCTUATION, k=draw.randrange(1, 8)))


def _anything(draw: random.Random) -> str:
    """Characters of a few blocks that have been full, or unchanged, for long."""
    blocks = ((0x20, 0x377), (0x400, 0x52F), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x1F300, 0x1F5FF), (0x2200, 0x23FF))
    return "".join(chr(draw.randrange(*draw.choice(blocks))) for _ in range(draw.randrange(1, 9)))


def _one_of(values: Sequence[str]) -> Callable[[random.Random], str]:
    return lambda draw: draw.choice(values)


_PARTS, _WEIGHTS = zip(
    (_words, 5),
    (_letters, 4),
    (_mixed_letters, 1),
    (_marked, 2),
    (_blanks, 4),
    (_digits, 3),
    (_punctuation, 3),
    (_anything, 1),
    (_one_of(_EMOJI), 2),
    (_one_of(_ODD), 1),
    (_one_of(_SHORT_FORMS), 2),
    (_one_of(_CODE), 2),
    (_one_of(_MIMICS), 1),
    strict=True,
)
