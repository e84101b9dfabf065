"""Decisions without I/O: (message, now) → (answer, effects).

Nothing in this room opens a socket, reads a clock, starts a thread, touches a disk or holds a tensor. Whoever drives it
(the server, the client, the simulator) brings the time and carries out the effects. That is why thousands of fault
schedules run in seconds, and why what they prove is true of what ships.
"""
