"""``python -m cpumond``."""

from cpumond.cli import main

main()
