#!/bin/sh
# Makes .venv in the checkout with cpumond and all that its tests need, or adds that to the one which is there.
# usage: sh tests/venv.sh
exec sh "$(dirname "$0")/../packaging/venv.sh" test
