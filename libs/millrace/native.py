"""The compiled modules of ``native/``; the only place that imports ``millrace_native``.

Raises ImportError with the way out where they are not built, or were built from other sources than those beside it.
"""

_HOW = "`./task setup` builds it, and needs a C++ compiler (g++ or clang++, C++20)"

try:
    from millrace_native import enginemodel, kvcache, kvcopy
except ImportError as error:
    raise ImportError(f"the compiled module millrace_native is not there: {_HOW}") from error

if (enginemodel.INTERFACE, kvcache.INTERFACE, kvcopy.INTERFACE) != (6, 1, 1):
    raise ImportError(f"the compiled module millrace_native was built from other sources: {_HOW}")

__all__ = ["enginemodel", "kvcache", "kvcopy"]
