"""One file for each contestant; what they import lies in the environment of the race alone."""
