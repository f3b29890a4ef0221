"""Block: dispatch by simulated latencies, with its baselines."""
