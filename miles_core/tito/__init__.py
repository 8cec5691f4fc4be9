"""Token-exact sessions and model families."""
