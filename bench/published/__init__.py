"""Step times of engines put together from published kernel tables; the data lie in the folder ``MILLRACE_DATA``."""
