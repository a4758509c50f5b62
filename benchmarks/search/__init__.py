"""The search against what people use instead, on simulated machines (`python -m benchmarks.search`)."""
