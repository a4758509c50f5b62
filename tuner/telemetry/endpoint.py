"""Reads `/metrics` of one vLLM server at the least cost to that server; no answer is None, never an exception."""

from __future__ import annotations

import httpx

from tuner.telemetry.names import ALL, FAST, FAST_SAMPLES, samples_of
from tuner.telemetry.prometheus import parse

TIMEOUT_S = 2.0


class MetricsEndpoint:
    """One kept connection to `url` (`http://HOST:PORT/metrics`).

    A full answer costs the server 11 ms of its event loop, the five lines of a fast sample 1 ms (docs/telemetry.md).
    vLLM mounts Prometheus' own application at `/metrics/`, which renders only what `name[]` asks for; where that
    brings nothing (several API servers share their metrics through files) the plain address is read instead.
    """

    def __init__(self, url: str) -> None:
        self._plain = httpx.URL(url)
        slashed = self._plain.copy_with(path=self._plain.path.rstrip("/") + "/")
        self._fast = slashed.copy_merge_params({"name[]": [s for name in FAST for s in samples_of(name)]})
        self._complete = slashed.copy_merge_params({"name[]": [s for name in ALL for s in samples_of(name)]})
        self.selective = True  # until shown otherwise
        # The environment's proxies are none of ours: the server listens on loopback, where compression costs more than
        # it saves and certificates, which take 50 ms to load, have no part.
        headers = {"Accept-Encoding": "identity"}
        self._client = httpx.Client(timeout=TIMEOUT_S, trust_env=False, verify=False, headers=headers)

    def read(self, *, complete: bool) -> str | None:
        """The text of all metrics that are read at all, or of the fast ones; None when the server does not answer."""
        if self.selective:
            text = self._get(self._complete if complete else self._fast)
            if text is None or not parse(text, FAST_SAMPLES).empty:
                return text
            self.selective = False
        return self._get(self._plain)

    def close(self) -> None:
        self._client.close()

    def _get(self, url: httpx.URL) -> str | None:
        try:
            response = self._client.get(url)
        except httpx.HTTPError:
            return None
        if response.status_code >= 500:
            return None
        return response.text if response.status_code == 200 else ""
