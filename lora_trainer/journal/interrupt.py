"""Ctrl-C and SIGTERM: inside the loop they wait for the optimizer step to end; elsewhere they stop at once.

A second signal stops at once anywhere. An exception raised while Python cleans up an object is lost, so the wish is also
remembered, and asked for between phases. What is on disk stays whole: every file is written beside and renamed.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..errors import Interrupted, t


class StopRequest:
    """Truthy once the user has asked to stop."""

    def __init__(self) -> None:
        self.asked = False
        self.finishing_step = False

    def __bool__(self) -> bool:
        return self.asked

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if again or not self.finishing_step:
            self.check()

    def check(self) -> None:
        """Between phases."""
        if self.asked:
            raise Interrupted(t(pt="interrompido", en="interrupted"))

    @contextmanager
    def waiting_for_step(self) -> Iterator[None]:
        """Within, a signal only sets the request."""
        self.finishing_step = True
        try:
            yield
        finally:
            self.finishing_step = False


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # signals belong to the main thread
        yield request
        return
    names = [name for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), request._on_signal) for name in names}
    try:
        yield request
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
