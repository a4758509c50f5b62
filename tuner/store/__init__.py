"""Results on disk: versioned JSON records and raw requests, written atomically; it judges nothing."""

from tuner.store.files import append_line, read_text, usable_name, user_folder, write_atomic
from tuner.store.folder import ResultsFolder
from tuner.store.serial import dumps, loads, read_requests, write_requests

__all__ = [
    "ResultsFolder",
    "append_line",
    "dumps",
    "loads",
    "read_requests",
    "read_text",
    "usable_name",
    "user_folder",
    "write_atomic",
    "write_requests",
]
