"""INFaaS++: least memory in use per sequence of the batch."""
