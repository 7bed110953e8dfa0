#!/bin/sh
# Makes .venv in the checkout with cpumond and all that its tests need; installs Debian's python3-venv when it is missing.
# usage: sh tests/venv.sh
set -eu
cd "$(dirname "$0")/.."
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "cpumond needs python3 >= 3.11" >&2; exit 1; }
if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c '' 2>/dev/null; then
  if ! python3 -m venv .venv 2>/dev/null; then
    rm -rf .venv
    as_root apt-get update -qq
    as_root apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
    python3 -m venv .venv
  fi
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[scheduler,test]'
