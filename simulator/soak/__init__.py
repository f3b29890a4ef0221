"""Random load and random faults on whole clusters, seed by seed, with checkers."""
