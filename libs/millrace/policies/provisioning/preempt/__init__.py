"""Preempt: more instances as soon as what is *predicted* for placements is too slow."""
