"""Hosts actors as processes: the shell that services share, and companions of another actor's process."""
