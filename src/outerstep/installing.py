"""The line that installs an extra of this package, as errors and hints show it. One place decides its form."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit

NAME = "outerstep"


def install_line(extra: str = "", pip: str = "pip") -> str:
    """What to type to have outerstep with `extra`, from where this one was installed: a folder (a clone) is named, so
    that nobody's package of the same name on an index is taken in its place."""
    return f"{pip} install {requirement(_origin(), extra)}"


def requirement(origin: str | None, extra: str = "") -> str:
    """`origin`: the text of direct_url.json, which pip writes for what came from a folder, a file or a repository (PEP
    610); None = it came from an index."""
    wanted = f"[{extra}]" if extra else ""
    said = json.loads(origin) if origin is not None else {}
    if "dir_info" in said:
        folder = unquote(urlsplit(said["url"]).path)
        return ("-e " if said["dir_info"].get("editable") else "") + shlex.quote(folder + wanted)
    if "vcs_info" in said:
        where = f"{said['vcs_info']['vcs']}+{said['url']}@{said['vcs_info']['commit_id']}"
        return shlex.quote(f"{NAME}{wanted} @ {where}")
    if "url" in said:
        return shlex.quote(f"{NAME}{wanted} @ {said['url']}")
    return shlex.quote(NAME + wanted)


def _origin() -> str | None:
    try:
        return distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:  # its folder is on the path, and it was never installed
        return None
