"""Benchmarks: definitions, timing and result files. Nothing imports this package."""
