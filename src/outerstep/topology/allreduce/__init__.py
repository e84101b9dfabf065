"""Every rank of a process group is a worker; there is no server."""
