"""One file per problem; each has ``compare``, which runs bilevel's way and others on one seed."""
