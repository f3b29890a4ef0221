"""Llumnix's migration by freeness, as a policy of brokers."""
