"""Parts of Block's figures: its testbed as scenarios, many runs of them kept on disk, tables, bounds, pictures."""
