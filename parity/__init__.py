"""Comparisons of the JAX implementation with recorded numbers and with the PyTorch reference.

Start with `python -m parity --help`. Importing the package does nothing; the modules that need JAX
or PyTorch are imported by the commands that use them.
"""
