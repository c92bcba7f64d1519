"""A service on this machine that answers with bytes of the test's choice, or otherwise than HTTP has it."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

type Answer = Callable[[Callable[[bytes], None]], None]
"""Sends an answer, with the function that it gets."""


def said(body: bytes, status: str = "200 OK", headers: str = "Content-Type: application/json") -> Answer:
    head = f"HTTP/1.1 {status}\r\n{headers}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return lambda send: send(head + body)


def endless(send: Callable[[bytes], None]) -> None:
    """A body without an end."""
    send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    while True:
        send(b" " * (1 << 20))


def slow_body(send: Callable[[bytes], None]) -> None:
    send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    while True:
        send(b" ")
        time.sleep(0.1)


def slow_headers(send: Callable[[bytes], None]) -> None:
    send(b"HTTP/1.1 200 OK\r\n")
    while True:
        send(b"x")
        time.sleep(0.1)


def cut(send: Callable[[bytes], None]) -> None:
    """The connection is closed before the body is complete."""
    send(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"rewa')


@contextmanager
def hostile(answer: Answer, context: ssl.SSLContext | None = None) -> Iterator[tuple[str, list[bytes]]]:
    """Yields the address, and the requests that it has received. `context`: speaks TLS."""
    requests: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            told = context.wrap_socket(connection, server_side=True) if context else connection
            request = told.recv(1 << 16)
            while b"\r\n\r\n" in request:
                head, _, body = request.partition(b"\r\n\r\n")
                length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if b"content-length:" in line), 0)
                while len(body) < length:
                    body += told.recv(1 << 16)
                requests.append(head + b"\r\n\r\n" + body)
                answer(told.sendall)
                if answer in (endless, slow_body, slow_headers, cut):
                    return
                request = told.recv(1 << 16)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"{'https' if context else 'http'}://127.0.0.1:{server.getsockname()[1]}", requests
