"""Before an installation: say at once, in one line each, what this machine lacks. Standard library only."""

import os
import shutil
import sys
import sysconfig


def missing_tools():  # type: ignore[no-untyped-def]
    """What is missing, each with the thing to do. Runs on any Python 3, so no newer syntax here."""
    found = []
    if sys.version_info < (3, 10):
        found.append("Python %d.%d is too old: make PYTHON=python3.11, or newer" % sys.version_info[:2])
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        found.append("Python's venv module is missing: install it (Debian, Ubuntu: python3-venv)")
    headers = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if not os.path.exists(headers):
        found.append("Python's headers are missing (%s): install them (Debian: python3-dev)" % headers)
    if not (os.environ.get("CXX") or shutil.which("g++")):
        found.append("g++ is missing: DeepSpeed compiles an operator when it starts on a CPU (Debian: g++)")
    return found


if __name__ == "__main__":
    problems = missing_tools()
    for problem in problems:
        sys.stderr.write("Error: %s\n" % problem)
    if problems:
        sys.stderr.write("\nhint: nothing was installed; mend the above and run make again\n")
    sys.exit(3 if problems else 0)
