"""Benchmarks a user runs: `penstock bench throughput | latency | serve`. Every figure stands beside its roofline."""
