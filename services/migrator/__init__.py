"""The migrator: moves running sequences, with their KV, from its instance to others and takes theirs."""
