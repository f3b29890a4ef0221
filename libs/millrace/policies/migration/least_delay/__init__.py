"""Least delay: where transfer, decoding, and what it delays there are shortest together."""
