"""External: a grade from 0 to 100."""
