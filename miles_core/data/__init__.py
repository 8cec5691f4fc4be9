"""The columnar data model: what an engine sampled, carried unchanged to the trainer. Numpy only, no torch."""
