"""The formulas of the model: pure functions of arrays, no collectives, no caches."""
