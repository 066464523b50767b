"""Pallas (Mosaic GPU) kernels of the decode step; a leaf package that never imports `jax_impl`.

`jax_impl.stages.specialized` makes stages of them; `common.unmet_conditions` says why they cannot run.
"""
