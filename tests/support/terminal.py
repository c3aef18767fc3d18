"""Commands typed one after another on a real terminal, or into pipes, in a place of their own.

As a program it is the shell: it reads a JSON list of command lines from the file named first, and
says before and after each of them, on both streams, which it is and how it ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 120.0
HANG_UP = b"\x04hang up"
_SAID = re.compile(r"\x1e(\d+)\r?\n(.*?)\x1f(\d+)\r?\n", re.DOTALL)


class Shown(NamedTuple):
    """How a command ended and what was seen of it: on a terminal, both streams are one."""

    code: int
    out: str
    err: str = ""

    @property
    def text(self) -> str:
        return self.out + self.err


def environment(**changes: str) -> dict[str, str]:
    """This process's, without what changes how text is shown, and with `changes`."""
    without = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "LC_ALL", "LANG", "PYTHONIOENCODING")
    kept = {key: value for key, value in os.environ.items() if key not in without}
    return kept | {"OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "LANG": "C.UTF-8"} | changes


def into_pipes(
    place: Path, lines: Sequence[Sequence[str]], env: Mapping[str, str], python: str | Path
) -> list[Shown]:
    done = subprocess.run(
        _shell(place, lines, python), cwd=place, env=env, capture_output=True, timeout=LIMIT_S, check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    out, err = (_SAID.findall(stream.decode()) for stream in (done.stdout, done.stderr))
    assert len(out) == len(err) == len(lines), done.stderr.decode()
    return [
        Shown(int(code), said, told) for (_, said, code), (_, told, _) in zip(out, err, strict=True)
    ]


def on_terminal(
    place: Path,
    lines: Sequence[Sequence[str]],
    env: Mapping[str, str],
    python: str | Path,
    columns: int,
) -> list[Shown]:
    code, said = run_on_terminal(_shell(place, lines, python), place, env, columns)
    found = _SAID.findall(said)
    assert (code, len(found)) == (0, len(lines)), said
    return [Shown(int(code), out.replace("\r\n", "\n")) for _, out, code in found]


def run_on_terminal(
    argv: Sequence[str | Path],
    place: Path,
    env: Mapping[str, str],
    columns: int,
    react: Callable[[str], bytes] = lambda _: b"",
) -> tuple[int, str]:
    """Run a program on a terminal that it owns; its exit code and all that was seen.

    `react` is shown everything seen so far whenever there is more, and gives what is typed then;
    with HANG_UP the terminal is closed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))

    def own() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    with subprocess.Popen(
        argv, cwd=place, env=env, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=own,
    ) as process:  # fmt: skip
        os.close(theirs)
        seen = b""
        with suppress(OSError):  # what reading says when nobody has the terminal open any more
            while chunk := os.read(ours, 1 << 16):
                seen += chunk
                typed = react(seen.decode(errors="replace"))
                if typed is HANG_UP:
                    break
                if typed:
                    os.write(ours, typed)
        os.close(ours)
        code = process.wait(LIMIT_S)
    return code, seen.decode()


def _shell(place: Path, lines: Sequence[Sequence[str]], python: str | Path) -> list[str | Path]:
    typed = place / "typed.json"
    typed.write_text(json.dumps([list(line) for line in lines]))
    return [python, __file__, typed]


def _type(lines: Sequence[Sequence[str]]) -> None:
    from instar.cli.main import main
    from instar.logs.text.stdout import watch_streams

    watch_streams()
    for number, line in enumerate(lines):
        os.write(1, f"\x1e{number}\n".encode())
        if not os.isatty(2):
            os.write(2, f"\x1e{number}\n".encode())
        code = main(line)
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(1, f"\x1f{code}\n".encode())
        if not os.isatty(2):
            os.write(2, f"\x1f{code}\n".encode())


if __name__ == "__main__":
    _type(json.loads(Path(sys.argv[1]).read_text()))
