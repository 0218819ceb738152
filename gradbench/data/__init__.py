"""Real data: what ships with the dependencies at `size=tiny`, hub data sets or a local folder at `size=paper`."""
