"""The interpreter that trains on one device."""

from stretto.emulate.emulator import Emulator

__all__ = ["Emulator"]
