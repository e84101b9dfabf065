"""outerstep."""
