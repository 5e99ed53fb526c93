"""The error of all importers."""


class CannotImport(ValueError):
    """A file that is damaged, or whose network is not supported. The message says what is wrong and where."""


MOST_NAMES = 40  # in one message
LONGEST = 100  # letters of one of them


def listed(names: list[str]) -> str:
    """Names for a message: the first few, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return (
        ", ".join(
            name if len(name) <= LONGEST else f"{name[:LONGEST]}…" for name in names[:MOST_NAMES]
        )
        + more
    )
