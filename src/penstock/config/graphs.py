"""The sizes of step that CUDA graphs are captured for."""

MAX_GRAPH_SEQS = 512  # sequences that a graph decodes; more are decoded without one


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of decoding sequences, ascending: close together, as a step is padded to the next one. The last has room
    for all that run, or is MAX_GRAPH_SEQS."""
    usual = (1, 2, 4, *range(8, 257, 8), *range(272, MAX_GRAPH_SEQS + 1, 16))
    most = min(max_num_seqs, MAX_GRAPH_SEQS)
    return (*(size for size in usual if size < most), most)
