"""The codes of GGUF files as a GPU's products read them, arranged on the device of the weight."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.config.weights import GGUF_FORMATS, device_bytes, format_of
from penstock.kernels import detect_platform
from penstock.kernels.triton.repack import put_stored
from penstock.kernels.triton.weights import empty_codes
from tests.gguf.blocks import TYPES, random_rows, reference
from tests.kernels.device_weights import dense
from tests.kernels.native.reference import JOINED

pytestmark = pytest.mark.skipif(not detect_platform().isa, reason="no native kernels for this machine")
HERE = torch.device("cpu")


def stored_rows(stored: str, rows: int, k: int, seed: int) -> NDArray[np.uint8]:
    data = random_rows(stored, rows, k, seed=seed)
    if stored == "MXFP4":  # the exponents for which scales are exact as fp16
        data.reshape(-1, 17)[:, 0] = np.random.default_rng(seed).integers(104, 143, data.size // 17)
    return data


@pytest.mark.parametrize("names", [*((name,) for name in TYPES), *JOINED], ids="+".join)
@pytest.mark.parametrize("k", [256, 768])
def test_a_files_codes_keep_their_values(names: tuple[str, ...], k: int) -> None:
    rows = 21
    weight = empty_codes(rows * len(names), k, format_of(GGUF_FORMATS[name] for name in names), HERE)
    want = []
    for i, name in enumerate(names):
        data = stored_rows(name, rows, k, seed=i)
        for start, stop in ((16, rows), (0, 16)):
            put_stored(weight, rows * i + start, torch.from_numpy(data[start:stop].copy()), name)
        want.append(reference(name, data))
    np.testing.assert_array_equal(dense(weight).numpy(), np.concatenate(want))
    assert weight.nbytes == device_bytes(*weight.shape, weight.format, 0)


@pytest.mark.parametrize("stored", [name for name in TYPES if not GGUF_FORMATS[name].supers(256)])
def test_rows_need_not_have_whole_runs(stored: str) -> None:
    data = stored_rows(stored, 5, 96, seed=3)
    weight = empty_codes(5, 96, GGUF_FORMATS[stored], HERE)
    put_stored(weight, 0, torch.from_numpy(data), stored)
    np.testing.assert_array_equal(dense(weight).numpy(), reference(stored, data))


def test_scales_that_are_not_finite_are_refused() -> None:
    data = np.full((2, 34), 255, np.uint8)
    weight = empty_codes(2, 32, GGUF_FORMATS["Q8_0"], HERE)
    with pytest.raises(ValueError, match="2 rows hold infinity or NaN"):
        put_stored(weight, 0, torch.from_numpy(data), "Q8_0")
