"""Servers that judge the load generator: `reference` (C, its timing known exactly), `faults` (every odd answer)."""
