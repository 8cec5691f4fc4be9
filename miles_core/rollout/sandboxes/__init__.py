"""Sandboxes that ship with the core."""
