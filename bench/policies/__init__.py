"""Dispatch rules of other systems: what ``forecast`` is measured against. They see what it sees but for lengths."""
