"""How a run is executed: eagerly, compiled, stacked, or on several ranks."""
