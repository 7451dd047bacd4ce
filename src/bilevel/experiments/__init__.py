"""The paper's experiments and the demo; each is one function that returns its figures."""
