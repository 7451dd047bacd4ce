"""The command line: ``bilevel``."""
