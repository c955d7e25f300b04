"""The sizes of the decode steps for which CUDA graphs are captured."""

MAX_GRAPH_SEQS = 512  # sequences that a graph decodes; more are decoded without one


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of decoding sequences, ascending. They are close together because a step is padded to the next one. The
    last is max_num_seqs, or MAX_GRAPH_SEQS if that is less."""
    usual = (1, 2, 4, *range(8, 257, 8), *range(272, MAX_GRAPH_SEQS + 1, 16))
    most = min(max_num_seqs, MAX_GRAPH_SEQS)
    return (*(size for size in usual if size < most), most)
