"""The services of a Millrace cluster, one package each: none imports another."""
