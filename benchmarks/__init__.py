"""Benchmarks: a module each, printed as JSON. Run them alone: `python -m benchmarks.mesh --help`."""
