"""`python -m outerstep` is `outerstep`."""

from .cli import main

main()
