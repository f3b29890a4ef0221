"""KV-cache data structures: blocks, their free queue and the prefix index. No I/O; see README.md."""
