"""Common parts of the figures of length stages and trading: workloads, variants, paired runs kept on disk, tables."""
