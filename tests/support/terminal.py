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
    variables = {key: value for key, value in os.environ.items() if key not in without}
    return (
        variables | {"OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "LANG": "C.UTF-8"} | changes
    )


def into_pipes(
    place: Path, lines: Sequence[Sequence[str]], env: Mapping[str, str], python: str | Path
) -> list[Shown]:
    result = subprocess.run(
        _shell(place, lines, python), cwd=place, env=env, capture_output=True, timeout=LIMIT_S, check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    out, err = (_SAID.findall(stream.decode()) for stream in (result.stdout, result.stderr))
    assert len(out) == len(err) == len(lines), result.stderr.decode()
    return [
        Shown(int(code), stdout, stderr)
        for (_, stdout, code), (_, stderr, _) in zip(out, err, strict=True)
    ]


def on_terminal(
    place: Path,
    lines: Sequence[Sequence[str]],
    env: Mapping[str, str],
    python: str | Path,
    columns: int,
) -> list[Shown]:
    code, output = run_on_terminal(_shell(place, lines, python), place, env, columns)
    matches = _SAID.findall(output)
    assert (code, len(matches)) == (0, len(lines)), output
    return [Shown(int(code), out.replace("\r\n", "\n")) for _, out, code in matches]


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
    parent_fd, child_fd = pty.openpty()
    fcntl.ioctl(child_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    with subprocess.Popen(
        argv, cwd=place, env=env, stdin=child_fd, stdout=child_fd, stderr=child_fd,
        start_new_session=True, preexec_fn=take_terminal,
    ) as process:  # fmt: skip
        os.close(child_fd)
        output = b""
        with suppress(OSError):  # what reading says when nobody has the terminal open any more
            while chunk := os.read(parent_fd, 1 << 16):
                output += chunk
                keys = react(output.decode(errors="replace"))
                if keys is HANG_UP:
                    break
                if keys:
                    os.write(parent_fd, keys)
        os.close(parent_fd)
        code = process.wait(LIMIT_S)
    return code, output.decode()


def _shell(place: Path, lines: Sequence[Sequence[str]], python: str | Path) -> list[str | Path]:
    commands_file = place / "typed.json"
    commands_file.write_text(json.dumps([list(line) for line in lines]))
    return [python, __file__, commands_file]


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
