"""`python -m tilewise`: the command line where the package is on the path but not installed."""

from tilewise.cli import main

main()
