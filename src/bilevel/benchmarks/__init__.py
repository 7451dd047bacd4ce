"""What steps cost, measured: each benchmark has a ``run`` that returns its figures as rows."""
