"""The program of the keeper: ``python -I -S __main__.py RUNTIME_DIR``."""

from __future__ import annotations

import sys

# Nothing leads to the package without site. Last, so that nothing beside it hides a module of the standard library.
sys.path.append(__file__[: __file__.rindex("/cpumond/")])

from cpumond.host.executor.keeper.parent import main

sys.exit(main(sys.argv[1]))
