"""The machine: cores and memory, GPUs, and hardware that `penstock plan` has by name."""
