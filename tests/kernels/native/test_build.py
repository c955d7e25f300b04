"""The library that the tests load is the one its sources make."""

import ctypes

import pytest

from penstock.kernels.native.build import digest
from penstock.kernels.native.loader import LIBRARY


@pytest.mark.skipif(not LIBRARY.exists(), reason="the native kernels were not built")
def test_the_library_was_built_from_these_sources() -> None:
    library = ctypes.CDLL(str(LIBRARY))
    library.penstock_digest.restype = ctypes.c_char_p
    assert library.penstock_digest().decode() == digest(), "the C++ sources changed: run make install"
