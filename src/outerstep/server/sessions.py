"""The secret that a run's sessions are made of. It lies in the run's folder, so that a restarted server knows them, and
its workers need not all join again at once."""

from __future__ import annotations

import logging
import secrets

from ..durable.run_folder import RunFolder
from ..errors import ConfigError
from ..security.secret_files import read_secret, write_secret

log = logging.getLogger(__name__)

FILE = "session.key"
SECRET_BYTES = 32


def session_secret(folder: RunFolder | None) -> bytes:
    """Made at the first start. Where it cannot be kept to ourselves it lasts as long as this process: after a restart
    the workers join again, with their keys."""
    fresh = secrets.token_bytes(SECRET_BYTES)
    if folder is None:
        return fresh
    file = folder.place / FILE
    try:
        held = read_secret(file)
        if len(held) == SECRET_BYTES:
            return held
    except FileNotFoundError:
        pass
    except (OSError, ConfigError) as error:
        log.warning("the sessions of this run end with this server: %s", error)
        return fresh
    try:
        write_secret(file, fresh)
    except OSError as error:
        log.warning("the sessions of this run end with this server: %s", error)
    return fresh
