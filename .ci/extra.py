"""Print what an extra of pyproject.toml asks for, to install that without the package: `python .ci/extra.py docs`."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
print(*project["optional-dependencies"][sys.argv[1]])
