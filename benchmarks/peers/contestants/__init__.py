"""One file per contestant; their libraries are installed in the race's environment only."""
