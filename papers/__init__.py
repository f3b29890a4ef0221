"""Reproductions of papers, one folder each: policies for the core's slots, their benches and their tests."""

from pathlib import Path

#: This folder: settings name its policies by their paths.
PAPERS = Path(__file__).parent
