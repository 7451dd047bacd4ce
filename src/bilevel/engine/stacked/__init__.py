"""Many runs as one computation."""
