"""Assembly of the services on real machines. It stands above `services`, as `simulator` does in virtual time."""
