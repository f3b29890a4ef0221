"""Forecast: whoever is predicted to finish the request soonest."""
