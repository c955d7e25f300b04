"""Steps that are captured once and replayed: a native recording on a CPU, CUDA graphs on a GPU."""
