"""Benchmarks against peers, each pair measured in one run: `python -m bench`."""
