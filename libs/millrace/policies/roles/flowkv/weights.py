"""Weights of the scores: written by ``python -m bench flowkv_weights``."""

PREFILL_WEIGHTS = (1.0, 1.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0)
DECODE_WEIGHTS = (0.5, 1.0, 1.0, 0.0, 0.0, 0.5, 0.0, 0.0)
