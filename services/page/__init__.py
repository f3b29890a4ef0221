"""The page: an observer that shows requests move."""
