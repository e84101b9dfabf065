"""The processes of one torchrun job are one worker of a server."""
