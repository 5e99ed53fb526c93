"""Entry point of the ``unflip`` command and of ``python -m unflip``."""

from unflip.cli import run


def main() -> None:
    run()


if __name__ == "__main__":
    main()
