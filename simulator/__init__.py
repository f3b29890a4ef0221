"""Composes simulated clusters from the services' own actors, and runs scenarios, searches and random faults on them."""
