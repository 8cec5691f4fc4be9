"""Data sources that ship with the core."""
