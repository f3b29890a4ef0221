"""No balance: sequences move only where drains, roles, memory or boundaries want it."""
