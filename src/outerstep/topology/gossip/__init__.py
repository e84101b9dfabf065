"""Peers without a server, which vote on every round."""
