"""FlowKV: load scores and three scenarios."""
