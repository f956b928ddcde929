#!/bin/sh
# Usage: check_machine.sh PYTHON. Says what is missing for building fp4comm, before anything is downloaded.
python=$1

fail() {
    echo "fp4comm: $1" >&2
    exit 1
}

command -v "$python" >/dev/null || fail "$python not found; name one with: make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$python is $("$python" --version 2>&1); Python 3.10 or newer is needed: make PYTHON=..."
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python has no venv module (Debian and Ubuntu: package python3-venv)"
"$python" -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||
    fail "$python has no C headers (Debian and Ubuntu: package python3-dev)"
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    fail "no C++ compiler found (Debian and Ubuntu: package g++), or name one with: make CXX=/path/to/compiler"
