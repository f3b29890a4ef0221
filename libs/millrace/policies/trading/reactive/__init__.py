"""Balance by present loads alone, for comparison."""
