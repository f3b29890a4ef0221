"""CascadeInfer's bid-ask rule, as published."""
