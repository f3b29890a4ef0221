"""Round robin: candidates take turns in order of name."""
