"""The program of the keeper: ``python -I -S __main__.py RUNTIME_DIR``."""

from __future__ import annotations

import sys

# Without site, no path leads to the package. The path comes last: no file in it may hide a standard library module.
sys.path.append(__file__[: __file__.rindex("/cpumond/")])

from cpumond.host.executor.keeper.parent import main

sys.exit(main(sys.argv[1]))
