"""Two real engines behind Millrace whose running requests are moved: gaps, soak, prefill/decode split."""
