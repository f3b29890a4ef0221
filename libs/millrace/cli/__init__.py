"""The command line: ``millrace VERB``. One module per verb; the table of verbs is in verbs.py."""
