"""``python -m hipforge``: the command line, where its script is not on PATH."""

from hipforge.cli import main

main()
