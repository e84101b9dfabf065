"""Bytes: frames, messages, and two ways to carry them (HTTP and, for tests, memory). No tensors here.

`docs/reference/wire.md` specifies all of it in some dozen lines.
"""
