"""Records real vLLM engines: what each step computes, and how long it takes."""
