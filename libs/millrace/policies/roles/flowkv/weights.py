"""Weights of the scores: written by ``python -m bench flowkv_weights``."""

PREFILL_WEIGHTS = (0.0, 2.405, 0.0, 162.66, 2.404, 0.0, 0.0, 0.0)
DECODE_WEIGHTS = (0.0, 0.0, 0.0, 41.297, 3.838, 0.0, 0.0, 0.417)
