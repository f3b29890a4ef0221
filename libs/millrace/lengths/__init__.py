"""How long an answer will be: features of a request, models that predict, caches of real lengths. No I/O but files.py.

Import from the modules; README.md tells what is where.
"""
