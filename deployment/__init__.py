"""What puts the services together on real machines. It stands above `services`, as `simulator` does in virtual time."""
