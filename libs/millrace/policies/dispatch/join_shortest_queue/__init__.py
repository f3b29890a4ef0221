"""Join the shortest queue, counted in tokens: context that is decoded now and prompts that wait."""
