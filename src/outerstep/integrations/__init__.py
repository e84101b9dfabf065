"""Integrations with other engines and trainers: each needs the extra of its name, and nothing else imports them."""
