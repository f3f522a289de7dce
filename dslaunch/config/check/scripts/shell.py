"""A shell script as simple commands, with what the shell itself expands told apart from what it does not.

Enough of the grammar for a lint: quotes, ``$( )``, comments, continued lines, here-documents,
function bodies. A construct beyond that is read as words.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace

_HEREDOC = re.compile(r"<<(?P<dash>-?)[ \t]*(?P<quote>['\"\\]?)(?P<word>[A-Za-z_]\w*)['\"]?")
_FUNCTION = re.compile(r"^\s*(?:function\s+[\w:-]+\s*(?:\(\s*\))?|[\w:-]+\s*\(\s*\))\s*(?P<brace>\{?)")
_ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*\+?=")
_BEFORE_COMMAND = {
    "if", "then", "else", "elif", "while", "until", "do", "!", "{", "(", "time", "exec", "nohup", "env",
    "command",
}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """One simple command, or one line of a here-document.

    ``text`` is as written, continued lines joined. ``live`` has the same length with everything
    blanked that this shell does not expand: single quotes, escaped dollars, quoted here-documents.
    ``end`` is the separator behind it: ``|``, ``&``, ``;``, ``&&``, ``||`` or a line's end.
    """

    line: int
    text: str
    live: str
    end: str = "\n"
    heredoc: bool = False
    in_function: bool = False

    def words(self) -> list[str]:
        """The words without their quotes; split at blanks where the quotes do not close."""
        try:
            return shlex.split(self.text)
        except ValueError:
            return self.text.split()

    def argv(self) -> list[str]:
        """The words from the command's name on: no assignments, no ``then``, ``exec`` and the like."""
        words = self.words()
        while words and (words[0] in _BEFORE_COMMAND or _ASSIGNMENT.match(words[0])):
            words = words[1:]
        return words

    @property
    def name(self) -> str:
        """The command's name without its folder; empty for assignments and here-documents."""
        words = [] if self.heredoc else self.argv()
        return words[0].rpartition("/")[2] if words else ""

    def inner_words(self) -> list[str]:
        """Its words, those of a quoted command line (``bash -c '...'``) one by one."""
        found: list[str] = []
        for word in self.argv():
            found += word.split() if re.search(r"\s", word) else [word]
        return found


def read_shell(text: str) -> list[Command]:
    """All commands of a script in order. Raises nothing, whatever the text."""
    return _mark_functions(_Reader(text).read())


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.line = text, 0, 1
        self.found: list[Command] = []
        self.heredocs: list[re.Match[str]] = []
        self._begin()

    def _begin(self) -> None:
        self.words: list[str] = []
        self.live: list[str] = []
        self.start = self.line

    def _take(self, count: int, *, live: bool = True) -> None:
        part = self.text[self.at : self.at + count]
        if not "".join(self.words).strip():
            self.start = self.line
        self.words.append(part)
        self.live.append(part if live else " " * len(part))
        self.line += part.count("\n")
        self.at += count

    def _finish(self, end: str) -> None:
        text = "".join(self.words)
        if text.strip():
            self.found.append(Command(self.start, text.strip(), "".join(self.live).strip(), end))
        self._begin()

    def read(self) -> list[Command]:
        modes = ["command"]  # what surrounds the character: command, double quotes, or $( )
        text, size = self.text, len(self.text)
        while self.at < size:
            char, mode = text[self.at], modes[-1]
            if char == "\\":
                self._escape()
            elif char == '"':
                if mode == '"':
                    modes.pop()
                else:
                    modes.append('"')
                self._take(1)
            elif text.startswith("$(", self.at):
                modes.append("$(")
                self._take(2)
            elif mode == '"':
                self._take(1)
            elif char == "'":
                end = text.find("'", self.at + 1)
                self._take((end if end >= 0 else size - 1) + 1 - self.at, live=False)
            elif char == "#" and (self.at == 0 or text[self.at - 1] in " \t\n;&|("):
                end = text.find("\n", self.at)
                self.at = end if end >= 0 else size
            elif mode == "$(":
                if char == "(":
                    modes.append("$(")
                elif char == ")":
                    modes.pop()
                self._take(1)
            else:
                self._plain(char)
        self._finish("\n")
        return self.found

    def _escape(self) -> None:
        if self.text.startswith("\\\n", self.at):
            self.at += 2
            self.line += 1
            self.words.append(" ")
            self.live.append(" ")
        else:
            self._take(min(2, len(self.text) - self.at), live=False)

    def _plain(self, char: str) -> None:
        """A character outside of quotes and ``$( )``."""
        heredoc = _HEREDOC.match(self.text, self.at) if char == "<" else None
        if self.text.startswith("<<<", self.at):
            self._take(3)
        elif heredoc is not None:
            self.heredocs.append(heredoc)
            self._take(heredoc.end() - self.at)
        elif char == "\n":
            self._finish("\n")
            self.at += 1
            self.line += 1
            for match in self.heredocs:
                self._heredoc(match)
            self.heredocs = []
            self._begin()
        elif self.text[self.at : self.at + 2] in ("&&", "||"):
            self._separate(self.text[self.at : self.at + 2])
        elif char in ";|" or (char == "&" and not self._is_redirection()):
            self._separate(char)
        else:
            self._take(1)

    def _separate(self, separator: str) -> None:
        self.at += len(separator)
        self._finish(separator)

    def _is_redirection(self) -> bool:
        """``2>&1``, ``>&2``, ``&>file``, ``<&3``."""
        before, after = self.text[self.at - 1 : self.at], self.text[self.at + 1 : self.at + 2]
        return before in ("<", ">") or after == ">"

    def _heredoc(self, match: re.Match[str]) -> None:
        while self.at < len(self.text):
            end = self.text.find("\n", self.at)
            end = len(self.text) if end < 0 else end
            line = self.text[self.at : end]
            self.at, number = end + 1, self.line
            self.line += 1
            if (line.lstrip("\t") if match["dash"] else line).rstrip("\r") == match["word"]:
                return
            live = "" if match["quote"] else re.sub(r"\\.", "  ", line)
            self.found.append(Command(number, line, live, heredoc=True))


def _mark_functions(commands: list[Command]) -> list[Command]:
    marked, depth, waiting = [], 0, False
    for command in commands:
        if command.heredoc:
            marked.append(replace(command, in_function=depth > 0))
            continue
        match = _FUNCTION.match(command.text)
        if depth == 0 and match:
            depth, waiting = (1, False) if match["brace"] else (0, True)
        elif waiting and command.text.startswith("{"):
            depth, waiting = 1, False
        elif depth and re.match(r"\{(\s|$)", command.text):
            depth += 1
        elif depth and re.match(r"\}", command.text):
            depth -= 1
        marked.append(replace(command, in_function=depth > 0))
    return marked
