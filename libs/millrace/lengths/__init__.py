"""Output-length prediction: request features, prediction models, caches of real lengths. No I/O except in files.py.

Import from the modules; README.md tells what is where.
"""
