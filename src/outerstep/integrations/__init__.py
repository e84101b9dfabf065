"""Ways into other people's engines: each file needs the extra of its name, and nothing of ours imports any of them."""
