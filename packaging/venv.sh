#!/bin/sh
# Makes .venv in the checkout with cpumond and what it runs on, and says what it does meanwhile. What is there is used.
# usage: sh packaging/venv.sh [test | all]    also what `pytest`, or `pytest --all` and lint need (tests/venv.sh [all])
set -eu
cd "$(dirname "$0")/.."
unset PYTHONPATH PYTHONHOME  # else pip takes what lies there for installed
stop() { echo "cpumond: $*" >&2; exit 1; }
is_new_enough() { python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
case "${1:-}" in
  "") level=0 extras=. content="cpumond and its libraries: 65 MB" ;;
  test) level=1 extras=".[test]" content="cpumond and what its tests need: 140 MB" ;;
  all) level=2 extras=".[test,test-all]" content="cpumond and what all tests and lint need: 560 MB" ;;
  *) stop "usage: sh packaging/venv.sh [test | all]" ;;
esac

# Made at this place, by this pyproject.toml, and it starts: there is nothing to do, also without a network.
mark=$({ pwd; cat pyproject.toml; } | cksum)
if grep -qsxF "$level $mark" .venv/cpumond.made && .venv/bin/cpumond --version >/dev/null 2>&1; then exit 0; fi

if ! .venv/bin/python -c '' 2>/dev/null; then
  if ! is_new_enough || ! python3 -c 'import ensurepip' 2>/dev/null; then
    root=
    [ "$(id -u)" = 0 ] || root="sudo -n"
    if ! command -v apt-get >/dev/null || ! $root true 2>/dev/null; then
      stop "this needs Python 3.11 or later with its venv: as root, apt-get install python3 python3-venv"
    fi
    echo "Installing Debian's python3-venv, which is missing ..."
    { $root apt-get update -qq &&
      $root env DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends python3 python3-venv >/dev/null
    } || stop "apt-get could not install python3-venv; why is said above"
    is_new_enough || stop "this needs Python 3.11 or later; here is $(python3 --version)"
  fi
  echo "Making a Python environment: $PWD/.venv (rm -r .venv removes it) ..."
  python3 -m venv .venv || stop "python3 -m venv failed; why is said above"
fi

echo "Installing $content in .venv, from pip's index ..."
# A pipe has the exit code of its end: that pip succeeded is known by the file.
{
  .venv/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off --editable "$extras" 2>&1 &&
    seq 0 $level | sed "s/\$/ $mark/" >.venv/cpumond.new
} | tee .venv/pip.log | sed -nu '/\.metadata/d; s/ (from .*//; s/^ *error:/ERROR:/Ip; /^WARNING: Retrying/p
  s/^ *\(Downloading\|Using cached\|Processing\) \([^ ]*\/\)\{0,1\}\([^- ]*-[^- ]*\)[^ ]*/  \3/p'
mv .venv/cpumond.new .venv/cpumond.made 2>/dev/null || {
  echo "The last lines of pip, all of them are in .venv/pip.log:" >&2
  tail -n 25 .venv/pip.log >&2
  stop "pip could not install it; why is said above.
It needs the network, behind a proxy HTTPS_PROXY, or what PIP_INDEX_URL or
PIP_FIND_LINKS name. Run it again: it goes on from here"
}
echo "Done: $(du -sm .venv | cut -f 1) MB."
