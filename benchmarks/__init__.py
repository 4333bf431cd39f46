"""Benchmarks of the library and of its peers."""
