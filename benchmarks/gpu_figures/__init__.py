"""The parts of benchmarks/gpu.py: the models, the ops and the rooflines of a GPU."""
