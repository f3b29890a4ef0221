"""ARES's rescheduling by future load, as a policy of brokers."""
