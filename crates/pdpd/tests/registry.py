"""A registry for tests, over TLS: /v2/lab/good is an image; other repositories are what hostile registries do.

Arguments: certificate and key (PEM) and a port of somebody else's. Prints its own port.
"""
import hashlib, http.server, io, json, ssl, sys, tarfile, threading, time

certificate, key, other = sys.argv[1:4]


def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def layer(mark):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        entry = tarfile.TarInfo("etc/mark")
        entry.size = len(mark)
        tar.addfile(entry, io.BytesIO(mark))
    return out.getvalue()


realm = None
BLOBS, TYPE = {}, "application/vnd.docker.distribution.manifest.v2+json"
LIST = "application/vnd.docker.distribution.manifest.list.v2+json"


def image(mark, size=None):
    """A manifest whose blobs are known, and the layer's digest."""
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {"Cmd": ["/x"]},
                         "rootfs": {"type": "layers", "diff_ids": [digest(layer(mark))]}}).encode()
    blobs = [config, layer(mark)]
    for blob in blobs:
        BLOBS[digest(blob)] = blob
    return json.dumps({
        "schemaVersion": 2, "mediaType": TYPE,
        "config": {"mediaType": "application/vnd.docker.container.image.v1+json",
                   "digest": digest(config), "size": len(config)},
        "layers": [{"mediaType": "application/vnd.docker.image.rootfs.diff.tar",
                    "digest": digest(blobs[1]), "size": size or len(blobs[1])}],
    }).encode()


MANIFESTS = {name: image(name.encode()) for name in ["good", "lies", "half", "away", "slow"]}
MANIFESTS["moved"] = image(b"first")
MANIFESTS["secret"] = image(b"secret")
MANIFESTS["flood"] = image(b"flood", 1 << 40)
index = {"schemaVersion": 2, "mediaType": LIST, "manifests": [
    {"mediaType": TYPE, "digest": "sha256:" + "0" * 64, "size": 1, "platform": {"os": "linux", "architecture": "arm64"}},
    {"mediaType": TYPE, "digest": digest(MANIFESTS["good"]), "size": len(MANIFESTS["good"]),
     "platform": {"os": "linux", "architecture": "amd64"}}]}
MANIFESTS["several"] = json.dumps(index).encode()
index["manifests"].pop()
MANIFESTS["foreign"] = json.dumps(index).encode()
MANIFESTS["none"] = b"{}"
KNOWN = {digest(manifest): manifest for manifest in MANIFESTS.values()}
LAYERS = {name: json.loads(text)["layers"][0]["digest"] for name, text in MANIFESTS.items() if b'"layers"' in text}


class Registry(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, data, kind, length=None):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length or len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        global realm
        parts = self.path.split("/")
        known = self.headers.get("Authorization") == "Basic bWU6cGFzcw=="
        if not realm and not known and (self.path == "/v2/" or "/secret/" in self.path):
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="r"')
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if self.path.startswith("/realm/"):
            realm = self.path.removeprefix("/realm/")
            return self.answer(b"", "text/plain")
        if realm and self.path == "/v2/":
            self.send_response(401)
            self.send_header("WWW-Authenticate", f'Bearer realm="http://{realm}/token",service="r"')
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if self.path == "/v2/":
            return self.answer(b"{}", "application/json")
        if self.path == "/move":
            MANIFESTS["moved"] = image(b"second")
            KNOWN[digest(MANIFESTS["moved"])] = MANIFESTS["moved"]
            return self.answer(b"", "text/plain")
        name, kind, what = parts[-3:]
        # Sends who asks for its manifest, or for its blobs, elsewhere.
        if name.startswith("to-"):
            _, part, host, port = name.split("-")
            if part == kind:
                self.send_response(307)
                self.send_header("Location", f"http://{host}:{port}/secret")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            name = "good"
        if name == "stall":
            self.send_response(200)
            self.end_headers()
            time.sleep(600)
        if kind == "manifests":
            data = KNOWN.get(what) or MANIFESTS.get(name)
            if name == "liar":
                data = MANIFESTS["good"]
            if data is None:
                return self.send_error(404)
            return self.answer(data, LIST if b'"manifests"' in data else TYPE)
        data, mine = BLOBS.get(what), what == LAYERS.get(name)
        if data is None:
            return self.send_error(404)
        if mine and name == "lies":
            data = data[:600] + b"x" + data[601:]
        if mine and name == "half":
            self.answer(data[: len(data) // 2], "application/octet-stream", len(data))
            self.close_connection = True
            return self.wfile.flush()
        if mine and name == "slow":
            self.answer(data[:100], "application/octet-stream", len(data))
            time.sleep(600)
        if mine and name == "away":
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.1:{other}/secret")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if mine and name == "flood":
            self.answer(b"", "application/octet-stream", 1 << 40)
            while True:
                self.wfile.write(bytes(1 << 20))
        self.answer(data, "application/octet-stream")


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass


server = Server(("127.0.0.1", 0), Registry)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate, key)
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_port, flush=True)
server.serve_forever()
