"""A benchmark-driven tuner for `vllm serve`: the most traffic within an SLO, with proof."""

__version__ = "0.1.0"
