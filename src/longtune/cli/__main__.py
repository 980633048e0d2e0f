"""`python -m longtune.cli`: the command, where a script of that name may not be on the path."""

from longtune.cli import main

main()
