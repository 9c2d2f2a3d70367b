"""Graphs that are compiled on a thread of their own."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from torch import fx

from apollo_compile.torch_bridge.whole import compile_on_thread


def test_an_interrupt_ends_a_compile_on_its_own_thread_too() -> None:
    """Let the next compile not run beside it: much of torch's state while it compiles is the process's."""
    began, ended = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        try:
            for _ in range(3000):
                time.sleep(0.01)
        finally:
            ended.set()

    def interrupt() -> None:
        began.wait()
        time.sleep(0.3)  # until the caller waits
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            compile_on_thread(fx.GraphModule({}, fx.Graph()), work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()
