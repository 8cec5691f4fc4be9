"""Environments that ship with the core."""
