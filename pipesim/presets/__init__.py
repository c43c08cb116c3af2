"""Measured and catalogue figures that ship with pipesim, as TOML files."""
