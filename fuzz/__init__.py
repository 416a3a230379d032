"""Mutated input, time-boxed: `python -m fuzz`."""
