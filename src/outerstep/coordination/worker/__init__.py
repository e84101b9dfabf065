"""The worker's half of a round, without I/O."""
