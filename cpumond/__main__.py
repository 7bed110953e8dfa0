"""Entry point of ``cpumond`` and ``python -m cpumond``."""

import os
import sys


def main() -> None:
    """Run the command line. ``restore`` imports less, because jobs may be throttled until it is done."""
    if sys.argv[1:2] == ["restore"]:
        from cpumond.agent.limits.first_aid import raise_quotas

        raise_quotas(os.environ)
        if sys.argv[2:] == ["--quick"] and "SERVICE_RESULT" in os.environ:
            return
        from cpumond.agent.limits.restore import main as restore

        code = restore(sys.argv[2:], os.environ)
        if code is not None:
            sys.exit(code)
    from cpumond.cli import main as run

    run()


if __name__ == "__main__":
    main()
