"""What verify shows: on terminals of several widths, in a pipe, and when it is interrupted."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

IMPLEMENTATIONS = Path(__file__).parent / "implementations.py"
COMMAND = [sys.executable, "-m", "tilewise", "verify", "flash", "--config", "T=64,H=1", "--config", "T=5"]
COMMAND += ["--dtype", "fp32", "--no-grad"]
FAILING = [*COMMAND, "--impl", f"{IMPLEMENTATIONS}:fails_from_17_tokens_on"]


class Terminal:
    """A program on a pseudo-terminal, and the lines that it leaves on the screen."""

    def __init__(self, words: list[str], columns: int) -> None:
        parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
        environment.pop("NO_COLOR", None)
        # Tests that run in the background ignore Ctrl-C, and a program would inherit that.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            words, stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True
        )
        signal.signal(signal.SIGINT, before)
        os.close(child)
        self._parent, self.written = parent, b""

    def read_until(self, text: bytes = b"", seconds: float = 120.0) -> None:
        """Read on until the text comes, or to the end."""
        end = time.monotonic() + seconds
        while not text or text not in self.written:
            assert time.monotonic() < end, self.written
            try:
                piece = os.read(self._parent, 65536)
            except OSError:
                piece = b""
            if not piece:
                return
            self.written += piece

    def screen(self) -> list[str]:
        """What is left on the screen, line by line."""
        lines, row, column = [""], 0, 0
        for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", self.written.decode()):
            if piece == "\r":
                column = 0
            elif piece == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif not piece.startswith("\x1b"):
                line = lines[row].ljust(column)
                lines[row] = line[:column] + piece + line[column + len(piece) :]
                column += len(piece)
            elif piece.endswith("A"):
                row = max(0, row - int(piece[2:-1] or 1))
            elif piece.endswith("K"):
                lines[row] = "" if piece[2:-1] == "2" else lines[row][:column]
        return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize(
    "columns", [80, pytest.param(120, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.slow)]
)
def test_a_terminal_keeps_whole_lines(columns):
    terminal = Terminal([*FAILING, "-v"], columns)
    terminal.read_until()
    assert terminal.process.wait(60) == 1
    screen = terminal.screen()
    assert re.fullmatch(r"✗ flash T=64,H=1 +fp32 \S+ +wrong values", screen[0])
    assert screen[1].startswith("    ✗ o     max_diff")
    assert any(line.startswith("        looks like: only from row 16 on, of 64") for line in screen)
    assert any(re.fullmatch(r"✓ flash T=5 +fp32 \S+ +(o|lse) 0\.\d\d of allowed", line) for line in screen)
    assert screen[-1] == "FAIL: 1 of 2 checks failed"
    assert screen[-3].split() == ["operator", "backends", "checks", "worst", "where", "seconds"]
    assert screen[-2].startswith("flash ")
    # A bar was shown meanwhile, and is gone.
    assert "0/2" in terminal.written.decode()
    assert not any("0/2" in line for line in screen)
    table = [line for line in screen if line.startswith(("operator", "flash ")) or line[:1] in "✓✗"]
    assert max(map(len, table)) <= 100
    assert all(len(line) <= 80 for line in screen[-3:])


@pytest.mark.slow
def test_a_pipe_gets_what_fails_a_table_and_the_verdict():
    outcome = subprocess.run(COMMAND, capture_output=True, text=True, check=True)
    lines = outcome.stdout.splitlines()
    assert lines[0].split() == ["operator", "backends", "checks", "worst", "where", "seconds"]
    assert re.fullmatch(r"flash +triton cpu +4 +0\.\d\d +(o|lse), T=\S+, fp32 +\d+\.\d", lines[1])
    assert lines[2:] == ["PASS: all 4 checks passed: outputs against fp64 truth"]
    assert outcome.stderr == ""


@pytest.mark.slow
def test_ctrl_c_says_how_far_it_came_and_ends():
    terminal = Terminal([*COMMAND, "--impl", f"{IMPLEMENTATIONS}:hangs"], 80)
    terminal.read_until(b"0/2")
    # The terminal would send it to every process of the group.
    os.killpg(terminal.process.pid, signal.SIGINT)
    terminal.read_until(seconds=40)
    assert terminal.process.wait(20) == 130
    assert terminal.screen() == ["interrupted: 0 of 2 checks, none failed"]
