"""Kimi K3's decode step in JAX: configuration, weights, caches, stages, step and engine."""
