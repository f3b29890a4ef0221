"""Real engines behind Millrace: recorded arrivals played to them, what came of it, and the same in simulation."""
