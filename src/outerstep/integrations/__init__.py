"""Integrations with other engines: each file needs the extra of its name, and no other module imports them."""
