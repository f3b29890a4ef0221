"""Most idle: where most KV memory is free afterwards; the nearer one of two alike."""
