"""The run config: one TOML file, frozen and typed, every value knows where it came from."""
