"""Heads in the libraries that train models: one module for each library, which is imported only there."""
