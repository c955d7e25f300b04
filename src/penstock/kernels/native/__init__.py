"""Native kernels: C++ compiled for each instruction set, of which the best is chosen at start (see docs/kernels.md)."""
