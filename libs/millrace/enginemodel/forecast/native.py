"""The fast forecast, where it is built. The only place that imports ``millrace_native``."""

from __future__ import annotations

#: Whether the compiled module is there.
NATIVE = False
