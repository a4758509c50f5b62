"""A timer of the kernel that wakes an event loop to the microsecond; it keeps no list of what is due.

The timers of asyncio on uvloop count whole milliseconds, which would be most of the send lag that is allowed.
"""

from __future__ import annotations

import ctypes
import os
import time

_ABSOLUTE = 1  # TFD_TIMER_ABSTIME, timerfd_create(2)
_NS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class Timer:
    """A timerfd on the clock of `time.monotonic_ns`; give `fd` to `loop.add_reader`."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        self._check(self.fd)

    def set(self, due_ns: int, period_ns: int = 0) -> None:
        """Become readable at `due_ns` (at once where that has passed), then every `period_ns`."""
        self._arm(max(due_ns, 1), period_ns)

    def disarm(self) -> None:
        """Stay silent."""
        self._arm(0, 0)

    def clear(self) -> int:
        """Acknowledge; how many periods have passed since the last time."""
        try:
            return int.from_bytes(os.read(self.fd, 8), "little")
        except BlockingIOError:
            return 0

    def _arm(self, due_ns: int, period_ns: int) -> None:
        spec = _Itimerspec(_Timespec(*divmod(period_ns, _NS)), _Timespec(*divmod(due_ns, _NS)))
        self._check(self._libc.timerfd_settime(self.fd, _ABSOLUTE, ctypes.byref(spec), None))

    def _check(self, result: int) -> None:
        if result < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
