#!/bin/sh
# Builds the Debian package from this checkout: cpumond_VERSION-1_ARCH.deb, in OUT.
#
#   packaging/build-deb.sh [OUT]            OUT is dist/ where it is not given
#
# Needs debhelper, dpkg-dev, python3-venv and the network: the package carries a virtual environment of its own, and pip
# fetches what pyproject.toml names. DEB_VERSION overrides the version in the package's name.
set -eu
cd "$(dirname "$0")/.."
unset PYTHONPATH PYTHONHOME  # else pip takes what lies there for installed
out=${1:-dist}
mkdir -p "$out"
out=$(realpath "$out")
version=${DEB_VERSION:-$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' cpumond/__init__.py)-1}
# The same sources give the same package, byte by byte, and with the same libraries (PIP_CONSTRAINT).
date=$(date --utc --rfc-email --date="@$(python3 packaging/build_backend.py)")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
mkdir "$work/tree"
tar --create --exclude='./.*' --exclude=./build --exclude=./dist --exclude=./tests --exclude='*.egg-info' \
    --exclude=__pycache__ . | tar --extract --no-same-owner --directory "$work/tree"
cd "$work/tree"
cp -r packaging/debian debian
cat >debian/changelog <<CHANGELOG
cpumond ($version) unstable; urgency=medium

  * What changed is in /usr/share/doc/cpumond/changelog.gz.

 -- $(sed -n 's/^Maintainer: //p' debian/control)  $date
CHANGELOG

# debhelper gives the build an empty home; pip's cache and settings are still the caller's.
export PIP_CACHE_DIR="${PIP_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/pip}"
settings=${XDG_CONFIG_HOME:-${HOME:-/root}/.config}/pip/pip.conf
if [ -z "${PIP_CONFIG_FILE:-}" ] && [ -e "$settings" ]; then export PIP_CONFIG_FILE="$settings"; fi
dpkg-buildpackage --build=binary --unsigned-source --unsigned-changes --no-pre-clean >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; exit 1; }
cp "$work"/cpumond_*.deb "$out/"
for package in "$work"/cpumond_*.deb; do echo "$out/${package##*/}"; done
