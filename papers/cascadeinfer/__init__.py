"""CascadeInfer: stages by sequence length, and balance within them."""
