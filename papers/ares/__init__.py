"""ARES: decoding sequences are rescheduled by the load to come."""
