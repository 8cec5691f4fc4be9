"""Wire dialects: each module reads a client's request into a turn and writes the reply as that client expects it."""
