"""Attributes that a module has only inside a scope."""

from __future__ import annotations

from torch import nn

from unflip.kernels.attach import attached


def test_attached_restores_what_a_module_had() -> None:
    first, second = nn.Identity(), nn.Identity()
    vars(first)["kernel"] = "old"
    with attached([first, second], kernel="new"):
        assert vars(first)["kernel"] == vars(second)["kernel"] == "new"
        with attached([first], kernel=None):
            assert vars(first)["kernel"] is None
        assert vars(first)["kernel"] == "new"
    assert vars(first)["kernel"] == "old"
    assert "kernel" not in vars(second)
