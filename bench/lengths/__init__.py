"""Recorded output lengths of the models that ship, and how they were recorded."""
