"""The laws of each kind of component, one function a law, one module a kind.

A check takes a `miles_core.testing.kit.Case` and raises `AssertionError` with a sentence that says what is broken.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""
