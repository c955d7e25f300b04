"""The benchmarks behind `penstock bench throughput | latency | serve`."""
