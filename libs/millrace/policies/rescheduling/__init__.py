"""Rescheduling from one place: reference policies over the curves of all instances, in place of trading."""
