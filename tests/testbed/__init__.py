"""Live clusters, engines and clients for tests and benches: started here, driven here, stopped here."""
