"""Relief: more instances once requests *were* too slow."""
