#!/bin/sh
# Makes .venv in the checkout with cpumond and what `pytest` needs, or adds that to the one which is there.
# usage: sh tests/venv.sh [all]           with "all" also what `pytest --all`, lint and releases need
exec sh "$(dirname "$0")/../packaging/venv.sh" "${1:-test}"
