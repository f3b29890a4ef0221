"""Llumnix's dispatcher: memory in use and memory that the queue's prefills will need, per sequence of the batch."""
