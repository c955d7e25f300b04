"""The version of the package, apart from `penstock` itself, whose names import the library."""

__version__ = "0.1.0"
