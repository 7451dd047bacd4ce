"""One file per problem; each has ``solve``, which returns what it reached and its baseline."""
