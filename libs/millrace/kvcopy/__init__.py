"""Moving KV bytes between engines: the Copier port, the planner behind it, and its implementations. See README.md."""
