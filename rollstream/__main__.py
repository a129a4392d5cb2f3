"""`python -m rollstream`: the same as the `rollstream` command."""

from rollstream.cli import main

main()
