"""Stand-in for `torch_xmlir`: says that a chip is there and which."""

from __future__ import annotations

__version__ = "2.9.0+emulated"


class xpu:  # noqa: N801 - the vendor's name of a submodule
    """`torch_xmlir.xpu`."""

    @staticmethod
    def is_available() -> bool:
        """Always: who asks for the emulator gets it."""
        return True


def get_xpu_version() -> str:
    """The generation of the chip, a P800's."""
    return "KL3"
