"""Message types, ids, subjects and the wire codec: what crosses a process border, and nothing else.

One file per receiver. A message is a frozen, keyword-only msgspec Struct whose tag carries its version; a
compatible change is a new
field with a default, anything else is a new version. Nothing here does I/O.
"""
