"""The library that the tests load is the one its sources make."""

from penstock.kernels.native.build import digest
from penstock.kernels.native.loader import built_from


def test_the_library_was_built_from_these_sources() -> None:
    assert built_from() in ("", digest()), "the C++ sources changed: run make install"
