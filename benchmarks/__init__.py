"""Measurements: each module prints a table and writes its JSON beside itself."""
