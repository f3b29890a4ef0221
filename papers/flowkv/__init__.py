"""FlowKV: roles of instances for prefill and decode."""
