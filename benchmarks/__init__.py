"""Measurements. Run one with `python -m benchmarks.bench_<what>`, all with `make bench`."""
