"""Experiments on the library itself."""
