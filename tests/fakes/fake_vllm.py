"""A stand-in for `vllm` in tests of the process life cycle: real processes, signals, ports, segments and HTTP.

It serves no tokens. The environment variable FAKE_VLLM holds a JSON object of oddities (see `Script`).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType

HELP = """usage: vllm serve [model_tag] [options]

options:
  --max-num-seqs MAX_NUM_SEQS
                        Maximum number of sequences. (default: None)
  --enable-prefix-caching, --no-enable-prefix-caching
                        Whether to enable prefix caching. (default: None)
"""


@dataclass(frozen=True)
class Script:
    """What is odd about this server."""

    start_s: float = 0.2  # until ready, with a log line every 50 ms
    quiet: bool = False  # says nothing while starting
    babble: bool = False  # starts for ever, repeating that it waits
    die_s: float | None = None  # ends while starting, after this long
    die_code: int = 1
    leave_s: float | None = None  # ends by itself with exit code 0, this long after it was ready
    term: str = "end"  # on SIGTERM: `end`, `ignore`, `swallow-first`
    engine: bool = True  # has a child VLLM::EngineCore that holds a segment
    orphan_engine: bool = False  # the engine survives the main process and ignores SIGTERM
    escape: bool = False  # a grandchild runs away into its own session and keeps port and segment
    model: str = ""  # serves another model than asked
    reset: bool = True
    version: str = "0.32.0+cpu"
    help_code: int = 0


def rename(name: str) -> None:
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)  # PR_SET_NAME


def hold_segment() -> tuple[str, mmap.mmap]:
    """A segment made and mapped as multiprocessing.shared_memory does it; the name tells tests whose it is."""
    path = f"/dev/shm/psm_{os.environ['VLLM_TUNE_SERVER'][:12]}{secrets.token_hex(4)}"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(handle, 4096)
    return path, mmap.mmap(handle, 4096)


def engine(stubborn: bool) -> None:
    rename("VLLM::EngineCore")
    path, segment = hold_segment()
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("up")
    parent = os.getppid()
    while stubborn or os.getppid() == parent:
        time.sleep(0.05)
    segment.close()
    os.unlink(path)  # an orderly end; whoever is killed leaves it behind


def escape(port_handle: int) -> None:
    """Double fork, as a daemon does: own session, no parent of ours, the listening socket kept."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _, segment = hold_segment()
            os.set_inheritable(port_handle, True)
            while True:
                time.sleep(60)
                segment.flush()
        os._exit(0)
    os.wait()


def handler_for(script: Script, model: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self, document: object = None, status: int = 200) -> None:
            content = b"" if document is None else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            if self.path == "/health":
                self.answer()
            elif self.path == "/v1/models":
                self.answer({"object": "list", "data": [{"id": script.model or model, "max_model_len": 1024}]})
            else:
                self.answer({"detail": "Not Found"}, 404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path == "/reset_prefix_cache":
                self.answer({"success": script.reset})
            elif self.path == "/tokenize":
                self.answer({"tokens": list(json.loads(body)["prompt"].encode())})
            elif self.path == "/detokenize":
                self.answer({"prompt": bytes(json.loads(body)["tokens"]).decode()})
            else:
                self.answer({"detail": "Not Found"}, 404)

    return Handler


def say(text: str) -> None:
    print(text, flush=True)


def start_up(script: Script) -> None:
    began = time.monotonic()
    step = 0
    while script.babble or time.monotonic() - began < script.start_s:
        if script.die_s is not None and time.monotonic() - began > script.die_s:
            say("RuntimeError: Engine core initialization failed. See root cause above.")
            os._exit(script.die_code)
        if script.babble:
            say(f"Waiting for 1 local, 0 remote core engine proc(s) to start. {step}")
        elif not script.quiet:
            say(f"(EngineCore) INFO loading step {step}")
        step += 1
        time.sleep(0.05)


def serve(model: str, words: list[str], script: Script) -> None:
    terms = 0
    children: list[subprocess.Popen[bytes]] = []

    def on_term(number: int, frame: FrameType | None) -> None:
        nonlocal terms
        terms += 1
        if script.term == "ignore" or (script.term == "swallow-first" and terms == 1):
            say(f"SIGTERM {terms} has no effect")
            return
        for child in children:
            child.terminate()
        os._exit(0)

    signal.signal(signal.SIGTERM, on_term)
    say(f"INFO version {script.version} model {model}")
    if script.engine:
        role = "stubborn-engine" if script.orphan_engine else "engine"
        children.append(subprocess.Popen([sys.executable, __file__, role], stdout=subprocess.PIPE))
    start_up(script)
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()  # as vLLM does, it is ready only after its engine
    port = int(words[words.index("--port") + 1])
    server = ThreadingHTTPServer(("127.0.0.1", port), handler_for(script, model))
    if script.escape:
        escape(server.fileno())
    if script.leave_s is not None:
        threading.Timer(script.leave_s, lambda: os._exit(0)).start()
    say("INFO:     Application startup complete.")
    server.serve_forever()


def main(words: list[str]) -> int:
    script = Script(**json.loads(os.environ.get("FAKE_VLLM", "{}")))
    match words:
        case ["--version"]:
            say(script.version)
        case ["serve", "--help=all"]:
            if script.help_code:
                print("ImportError: libcudart.so.13: cannot open shared object file", file=sys.stderr)
                return script.help_code
            print(HELP)
        case ["engine" | "stubborn-engine" as role]:
            engine(stubborn=role == "stubborn-engine")
        case ["serve", model, *rest]:
            serve(model, rest, script)
        case _:
            print(f"unknown words: {words}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
