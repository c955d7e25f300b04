"""Native kernels: C++ for each instruction set, chosen when the process starts (see docs/kernels.md)."""
