"""A model of one vLLM V1 engine: the scheduler's rules as pure code, and time from a step-time model. See README.md."""
