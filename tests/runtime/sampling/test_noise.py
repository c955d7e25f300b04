"""The noise is a fixed function of (seed, choice, i, token), uniform and independent in all four."""

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.runtime.sampling import noise


def hashes(seed: int, choice: int, index: int, token_ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
    key = noise.keys(np.array([noise.stream(seed, choice)], np.uint64), np.array([index]))
    return noise.hash_tokens(token_ids, key)[0]


def plain_hash(seed: int, choice: int, index: int, token: int) -> int:
    """The algorithm as the module's docstring states it, in Python integers."""

    def mix64(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    def at(z: int, n: int) -> int:
        return mix64((z + (n + 1) * 0x9E3779B97F4A7C15) % 2**64)

    key = at(at(at(seed, 0), choice), index)
    x = token ^ (key % 2**32)
    x ^= x >> 17
    x = x * 0xED5AD4BB % 2**32 ^ (key >> 32)
    x ^= x >> 11
    x = x * 0xAC4C1B51 % 2**32
    x ^= x >> 15
    x = x * 0x31848BAB % 2**32
    return x ^ (x >> 14)


def test_golden_values() -> None:
    """A change here changes every sampled text of every seed."""
    tokens = np.array([0, 1, 2, 151935], np.uint32)
    assert hashes(0, 0, 0, tokens).tolist() == [1127656430, 1003031848, 1899511704, 862842455]
    assert hashes(2**64 - 1, 3, 1000, tokens).tolist() == [643233386, 3985519383, 3210217387, 2972306596]


def test_agrees_with_its_description() -> None:
    tokens = np.array([0, 1, 77, 6143, 151935, 2**31], np.uint32)
    for seed, choice, index in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**64 - 1, 127, 2**31), (12345, 2, 99)]:
        expected = [plain_hash(seed, choice, index, int(token)) for token in tokens]
        assert hashes(seed, choice, index, tokens).tolist() == expected


def test_splitmix64_is_the_published_one() -> None:
    """The first outputs of splitmix64 started at 1234567, as widely published with its C source."""
    outputs = noise.keys(np.full(3, 1234567, np.uint64), np.arange(3))
    assert outputs.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_token_draws_the_same_whichever_others_are_there() -> None:
    everything = hashes(5, 1, 9, np.arange(5000, dtype=np.uint32))
    some = np.array([4999, 3, 17, 1024], np.uint32)
    assert hashes(5, 1, 9, some).tolist() == everything[some].tolist()


def test_no_two_tokens_of_a_row_draw_the_same() -> None:
    assert len(np.unique(hashes(3, 0, 5, np.arange(1 << 18, dtype=np.uint32)))) == 1 << 18


def test_rows_have_their_own_keys() -> None:
    streams = np.array([noise.stream(seed, choice) for seed, choice in [(1, 0), (1, 1), (2, 0)]], np.uint64)
    index = np.array([4, 0, 7])
    tokens = np.arange(100, dtype=np.uint32)
    together = noise.hash_tokens(tokens, noise.keys(streams, index))
    alone = [hashes(1, 0, 4, tokens), hashes(1, 1, 0, tokens), hashes(2, 0, 7, tokens)]
    assert np.array_equal(together, alone)


def chi_square_per_degree(sample: NDArray[np.uint32], bins: int = 256) -> float:
    counts = np.bincount(sample.astype(np.uint64) * bins >> 32, minlength=bins)
    expected = len(sample) / bins
    return float(((counts - expected) ** 2 / expected).sum() / (bins - 1))


# With 255 degrees of freedom the statistic has mean 1 and deviation 0.089: 1.4 is 4.5 deviations out.
LIMIT = 1.4
STEPS = np.arange(1 << 16)


def over_steps(seed: int, choice: int, token: int) -> NDArray[np.uint32]:
    """One token's hash at every step of one choice."""
    key = noise.keys(np.full(len(STEPS), noise.stream(seed, choice), np.uint64), STEPS)
    return noise.hash_tokens(np.array([token], np.uint32), key)[:, 0]


def over_seeds(choice: int, index: int, token: int) -> NDArray[np.uint32]:
    key = noise.keys(np.array([noise.stream(seed, choice) for seed in range(8192)], np.uint64), np.full(8192, index))
    return noise.hash_tokens(np.array([token], np.uint32), key)[:, 0]


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(hashes(0, 0, 0, np.arange(1 << 17, dtype=np.uint32)), id="tokens"),
        pytest.param(hashes(7, 1, 3, np.arange(0, 1 << 22, 64, dtype=np.uint32)), id="tokens far apart"),
        pytest.param(over_steps(0, 0, 0), id="steps"),
        pytest.param(over_steps(2**63, 5, 6143), id="steps of another token"),
        pytest.param(over_seeds(0, 0, 11), id="seeds"),
    ],
)
def test_uniform_along_every_argument(sample: NDArray[np.uint32]) -> None:
    for rotation in (0, 8, 16, 24):  # every byte of the hash, not only its high one
        turned = (sample << np.uint32(rotation)) | (sample >> np.uint32((32 - rotation) % 32))
        assert chi_square_per_degree(turned if rotation else sample) < LIMIT


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param((over_steps(1, 0, 5)[:-1], over_steps(1, 0, 5)[1:]), id="one step and the next"),
        pytest.param((over_steps(1, 0, 5), over_steps(1, 0, 6)), id="one token and the next"),
        pytest.param((over_steps(1, 0, 5), over_steps(1, 1, 5)), id="one choice and the next"),
        pytest.param((over_steps(1, 0, 5), over_steps(2, 0, 5)), id="one seed and the next"),
        pytest.param((over_steps(1, 0, 5), over_steps(1 << 40, 0, 5)), id="seeds that differ in a high bit"),
    ],
)
def test_independent(pair: tuple[NDArray[np.uint32], NDArray[np.uint32]]) -> None:
    """The pairs fill a 16 by 16 table evenly."""
    first, second = pair
    cells = ((first >> np.uint32(28)) << np.uint32(28)) | ((second >> np.uint32(28)) << np.uint32(24))
    assert chi_square_per_degree(cells) < LIMIT


def test_every_input_bit_turns_half_of_the_output() -> None:
    tokens = np.arange(256, dtype=np.uint32)
    base = np.stack([hashes(9, 0, i, tokens) for i in range(64)])
    for bit in range(18):
        turned = base ^ np.stack([hashes(9, 0, i, tokens ^ np.uint32(1 << bit)) for i in range(64)])
        shares = [(turned >> np.uint32(b) & np.uint32(1)).mean() for b in range(32)]
        assert 0.47 < min(shares) <= max(shares) < 0.53


def test_gumbel_is_finite_and_falls_with_the_hash() -> None:
    values = noise.gumbel(np.array([0, 1, 1000, 2**31, noise.MAX_HASH - 1, noise.MAX_HASH], np.uint32))
    assert np.isfinite(values).all() and (np.diff(values) < 0).all()
    assert values[0] == pytest.approx(33 * np.log(2)) and values[-1] == pytest.approx(-np.log(33 * np.log(2)))


def test_gumbel_has_the_distribution_of_that_name() -> None:
    values = noise.gumbel(hashes(21, 0, 0, np.arange(1 << 17, dtype=np.uint32)))
    assert values.mean() == pytest.approx(np.euler_gamma, abs=0.02)
    assert values.var() == pytest.approx(np.pi**2 / 6, abs=0.04)
