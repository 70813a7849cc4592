"""Ctrl-C and SIGTERM: a run ends after the update under way, and says so at once."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Truthy once SIGINT or SIGTERM came; a second one ends the process as usual.

    Python runs a signal's handler between two lines of the main thread, which may be
    waiting for the device for minutes. What the user sees comes from a thread that the
    interpreter wakes at the instant of the signal.

    Args:
        say: called with the signal's name when it comes, from another thread.
    """

    def __init__(self, say: Callable[[str], None]):
        self.number = 0
        self._say = say
        self._before: dict[int, object] = {}

    @property
    def name(self) -> str:
        """Of the signal that came."""
        return signal.Signals(self.number).name

    def __bool__(self) -> bool:
        return self.number != 0

    def __enter__(self) -> "Interrupt":
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._woken_before = signal.set_wakeup_fd(
            self._write, warn_on_full_buffer=False
        )
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_) -> None:
        self._restore()
        signal.set_wakeup_fd(self._woken_before)
        os.close(self._write)  # ends the listener
        self._listener.join()
        os.close(self._read)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _listen(self) -> None:
        while received := os.read(self._read, 1):
            if received[0] in _SIGNALS:
                self._say(signal.Signals(received[0]).name)
                return
