"""Pallas (Mosaic GPU) kernels of the decode step; a leaf package that never imports `jax_impl`.

There is no kernel yet. `common.unmet_conditions` says what kernels need of the installation.
"""
