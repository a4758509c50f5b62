"""The command line: arguments, exit codes and printing; it decides nothing.

One module a command, each with `register(commands)`, which adds its parser and sets `handler`. Command modules import
the rooms inside their handlers, so that every command starts as quickly as it can.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from tuner import __version__
from tuner.errors import ExitCode, InputError, TunerError

COMMANDS = (
    "run",
    "plan",
    "doctor",
    "knobs",
    "bench",
    "diagnose",
    "compare",
    "verify",
    "nightly",
    "report",
    "export",
    "watch",
    "dashboard",
)

Handler = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """argparse, with its complaints in the shape of every other input error."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}\nSee `{self.prog} --help`.", file=sys.stderr)
        raise SystemExit(ExitCode.INPUT)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tune", description="Tune `vllm serve` to carry the most traffic within an SLO.")
    parser.add_argument("--version", action="version", version=f"vllm-tune {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name in COMMANDS:
        importlib.import_module(f"tuner.cli.{name}").register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Words after `--` are vLLM's and are kept apart."""
    words = list(sys.argv[1:] if argv is None else argv)
    fixed: list[str] = []
    if "--" in words:
        cut = words.index("--")
        words, fixed = words[:cut], words[cut + 1 :]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names come from files and servers
    arguments = argparse.Namespace()
    previous = {number: signal.signal(number, _interrupt) for number in _endings()}
    try:
        build_parser().parse_args(words, arguments)
        arguments.fixed = fixed
        handler: Handler = arguments.handler
        if getattr(arguments, "out", None) == "":
            raise InputError(
                where="command line",
                field="--out",
                value="",
                rule="names nothing",
                remedy="Name a file or folder, or leave it out.",
            )
        if fixed and not getattr(arguments, "takes_fixed", False):
            raise InputError(
                where="command line",
                field="--",
                value=" ".join(fixed),
                rule=f"`tune {arguments.command}` starts no server of its own, so it takes no vLLM flags",
                remedy="Leave out everything from `--` on.",
            )
        return handler(arguments)
    except TunerError as error:
        print(f"tune: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt as interrupt:
        print(f"tune: interrupted{''.join(f' by {name}' for name in interrupt.args)}", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output (`head`, `less`) has gone; that is no error of ours.
        sys.stderr.close()
        return int(ExitCode.OK)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print(f"tune: {_too_long(arguments, error)}", file=sys.stderr)
            return int(ExitCode.INPUT)
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"tune: {where}{error.strerror or error}. Check the path, its owner and permissions.", file=sys.stderr)
        return int(ExitCode.ENVIRONMENT)
    finally:
        for number, handling in previous.items():
            signal.signal(number, handling)


def _too_long(arguments: argparse.Namespace, error: OSError) -> InputError:
    """For every path that is looked at anywhere: the argument that no file system takes as a name."""
    found = str(error.filename)
    field, value = "path", found
    for name, given in vars(arguments).items():
        for text in given if isinstance(given, list) else [given]:
            if isinstance(text, str) and len(text) > 200 and text in found:
                field, value = "STUDY" if name == "study" else f"--{name.replace('_', '-')}", text
    return InputError(
        where="command line",
        field=field,
        value=value,
        rule="is too long for the name of a file",
        remedy="Check the path.",
    )


def _endings() -> list[signal.Signals]:
    """Signals that end a command like Ctrl-C does, whenever they come: all but a SIGHUP that is ignored (nohup)."""
    found = (signal.SIGTERM, signal.SIGHUP)
    return [number for number in found if signal.getsignal(number) is signal.SIG_DFL]


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Everything that a command holds is given back on the way out of it."""
    raise KeyboardInterrupt(signal.Signals(number).name)
