"""`python -m covey`: the same as the command `covey`."""

from covey.cli.main import main

main()
