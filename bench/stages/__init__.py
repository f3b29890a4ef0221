"""What the figures of length stages and trading share: workloads, variants, paired runs kept on disk, tables."""
