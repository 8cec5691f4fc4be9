"""Held-out evaluation, filed under the policy version that it measured."""
