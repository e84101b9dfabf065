"""Replica groups that come and go, by torchft's quorums."""
