"""Cascades of models: routing by thresholds, allocation of GPUs, and the two planned together. Pure; no I/O."""
