"""None: the cluster keeps the instances that it was given."""
