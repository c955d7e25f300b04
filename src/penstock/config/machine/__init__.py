"""The machine: cores and memory, GPUs, and hardware that `penstock plan` knows by name."""
