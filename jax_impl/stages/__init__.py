"""The twelve stages of a layer: `standard` (XLA); `specialized` (Pallas kernels) is to come."""
