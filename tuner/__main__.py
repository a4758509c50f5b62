"""`tune` and `python -m tuner`: the command line, from the first import on ended by Ctrl-C in one line."""

import sys


def main() -> int:
    try:
        from tuner.cli import main as command

        return command()
    except KeyboardInterrupt:
        print("tune: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
