"""A run on disk and in motion: directory, ledger, metrics, the loop, report, audit."""
