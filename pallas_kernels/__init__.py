"""Pallas (Mosaic GPU) kernels of the decode step; a leaf package that never imports `jax_impl`.

No stage runs them yet: `common.unmet_conditions` says why `latency_specialized` cannot be chosen.
"""
