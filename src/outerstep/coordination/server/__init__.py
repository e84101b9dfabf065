"""The server's half of a round, without I/O."""
