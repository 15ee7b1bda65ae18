"""Interpreters that train every worker of a schedule on one device, in one process."""

from stretto.emulate.emulator import Emulator

__all__ = ["Emulator"]
