"""Entry point of the ``unflip`` command; says what to install when the command line's parts are absent."""

import sys


def main() -> None:
    try:
        from unflip.cli import run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("unflip"):
            raise
        sys.exit(f"unflip: {error.name} is not installed. pip install 'unflip[train]'")
    run()


if __name__ == "__main__":
    main()
