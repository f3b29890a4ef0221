"""Bringing a cluster up on one machine: nats-server's configuration, the client of the process that forks workers."""
