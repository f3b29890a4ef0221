"""Workloads: when requests come and how long they are, drawn from fitted distributions or read from traces."""
