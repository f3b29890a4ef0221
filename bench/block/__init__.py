"""What Block's figures need: its testbed as scenarios, many runs of them kept on disk, tables, bounds, pictures."""
