"""Engine clients, and the embedded engine."""
