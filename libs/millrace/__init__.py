"""Millrace: serves language models on many engine instances, with every scheduling decision visible."""
