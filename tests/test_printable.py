"""Text from files is safe in a terminal, and the same from C and Python."""

import ctypes

import pytest

from unflip.printable import INVISIBLE, printable
from unflip.runtime._native import PATH

TEXTS = [
    "plain, Käfer 鳥 ❤️",
    "\x1b[31mred\x07\x7f\x9b",
    "left\u202eright\u2066\u200b\ufeff",
    "".join(sorted(INVISIBLE)),
    "\ue000\U000f0000\U0010ffff",
]


@pytest.mark.parametrize("text", TEXTS)
def test_c_and_python_escape_the_same(text: str) -> None:
    function = ctypes.CDLL(str(PATH)).unflip_printable
    function.restype, function.argtypes = (
        ctypes.c_size_t,
        [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t],
    )
    buffer = ctypes.create_string_buffer(4096)
    length = function(text.encode(), buffer, len(buffer))
    assert buffer.value.decode() == printable(text)
    assert length == len(buffer.value)
    assert not INVISIBLE & set(printable(text))


def test_a_plain_text_is_unchanged() -> None:
    assert printable(TEXTS[0]) == TEXTS[0]
