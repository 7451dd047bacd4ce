"""The paper's experiments, each one function that returns its figures."""
