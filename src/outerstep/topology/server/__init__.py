"""Contributions become agreements at a parameter server."""
