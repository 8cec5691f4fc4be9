"""Rewards that ship with the core."""
