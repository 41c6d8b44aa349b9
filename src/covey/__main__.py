"""`python -m covey`: the same as `covey`, where the command is not on the path."""

from covey.cli.main import main

main()
