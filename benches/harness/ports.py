"""Ports for programs that are started later."""

import socket
from contextlib import contextmanager


@contextmanager
def free_port():
    """A port of this host that nobody gets meanwhile who does not ask for it: bound, which lets a program listen there that reuses addresses, as all do."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
