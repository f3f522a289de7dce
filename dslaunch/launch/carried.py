"""Programs as they travel: on the stdin of whatever starts a process on another machine."""

from __future__ import annotations

import base64
import sys
import zlib
from functools import cache
from pathlib import Path

from dslaunch.launch import agent

# Fit for sh, csh and fish alike: no quote, dollar, backslash or exclamation mark inside single quotes
# that any of them would touch. $0 and $1 are for the inner sh.
_SHELL = 'p=$0; [ -x "$p" ] || p=python3; exec "$p" -I -S -c "$1"'
# Python of every version reads this; what we send is none to an older one.
REFUSE_OLD_PYTHON = (
    "v=sys.version.split()[0];sys.version_info<(3,8) and sys.exit("
    'sys.executable+" is Python "+v+": 3.8 or newer is needed");'
)
HINTS = {
    b": 3.8 or newer is needed": "have a newer python3 first in that host's PATH, or the launcher's own"
    " Python at the same path",
}
# The first line of stdin is the program, read byte by byte so that what follows is left for it.
LOADER = (
    f'import base64,sys,zlib;{REFUSE_OLD_PYTHON}f=open(0,"rb",0,closefd=False);'
    'p=f.readline() or sys.exit("nothing came on stdin: does ssh -n, StdinNull or a wrapper keep it?");'
    'p[:2]==b"eN" or sys.exit("a part of stdin was taken there: does a login script (.bashrc) read it?");'
    'exec(compile(zlib.decompress(base64.b64decode(p)),"agent.py","exec"))'
)


def loader_argv(*, forget: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The command that, run on the other machine, becomes the program that stdin brings (see :func:`packed`).

    It runs under the launcher's own Python, or ``python3`` where that is not there:
    it may need the standard library of 3.8 only. The ranks' program is another matter.
    ``forget``: variables that neither it nor what it starts shall see.
    """
    unset = f"unset {' '.join(forget)}; " if forget else ""
    return ("/bin/sh", "-c", unset + _SHELL, sys.executable, LOADER)


def packed(text: bytes) -> bytes:
    """A program's text as the line that LOADER reads. It knows it by the first two letters, zlib's own."""
    return base64.b64encode(zlib.compress(text, 9)) + b"\n"


@cache
def packed_agent() -> bytes:
    """The node agent. Its orders come behind it."""
    return packed(Path(agent.__file__).read_bytes())
