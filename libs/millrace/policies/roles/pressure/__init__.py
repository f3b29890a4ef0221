"""Pressure: flips where one phase misses its objective and the other has capacity left."""
