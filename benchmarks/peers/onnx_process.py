"""Serves one ONNX model in a process of its own: the peer of a server with many models.

python onnx_process.py PORT MODEL. A POST of the float32 rows of the one input is answered with those of the one output.
It needs onnxruntime and NumPy.
"""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import onnxruntime

port, path = int(sys.argv[1]), sys.argv[2]
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.enable_cpu_mem_arena = False
session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
tensor = session.get_inputs()[0]


class Infer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self.answer(b"ready")

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        rows = np.frombuffer(data, np.float32).reshape(-1, tensor.shape[1])
        self.answer(session.run(None, {tensor.name: rows})[0].tobytes())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


ThreadingHTTPServer(("127.0.0.1", port), Infer).serve_forever()
