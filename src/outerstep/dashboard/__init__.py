"""The page: a run in a browser, live, served by the server or peer that it shows."""

from .dashboard import Dashboard
from .logins import PeerTokens, ServerTokens, link_to

__all__ = ["Dashboard", "PeerTokens", "ServerTokens", "link_to"]
