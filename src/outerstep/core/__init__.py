"""The mathematics: pure functions of tensors. No I/O, no threads, no clock, no environment, no logging."""
