"""`tune` and `python -m tuner`: the command line, from the first import on ended by Ctrl-C in one line."""

import signal
import sys


def main() -> int:
    try:
        from tuner.cli import main as command

        code = command()
    except KeyboardInterrupt:
        print("tune: interrupted", file=sys.stderr)
        code = 130
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done and told: a late Ctrl-C must not change the exit code
    return code


if __name__ == "__main__":
    raise SystemExit(main())
