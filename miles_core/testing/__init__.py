"""The conformance kit for plugins: checks as plain functions, a class to subclass per kind, fixtures, a stub engine."""
