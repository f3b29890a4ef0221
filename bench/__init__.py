"""One command per published figure."""
