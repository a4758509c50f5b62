"""Puts one load of `bench_client.py` on a server by the load generator of the trials; it prints and judges nothing.

python client_driver.py URL LOAD-AS-JSON RESULT-FILE
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tuner.client import LoadRequest, run_load


def main() -> None:
    url, load, result_file = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    rng = random.Random(1)
    requests = []
    for index in range(load["count"]):
        body = {
            "model": "reference",
            "prompt": [rng.randrange(10_000, 99_999) for _ in range(load["prompt_tokens"])],
            "max_tokens": load["output_tokens"],
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        due_s = index / load["rate_rps"] if load["rate_rps"] else 0.0
        data = json.dumps(body, separators=(",", ":")).encode()
        tokens = load["prompt_tokens"], load["output_tokens"]
        requests.append(LoadRequest(index, "bench", due_s, data, "/v1/completions", *tokens, True))
    result = run_load(url, requests, workers=1, timeout_s=600, drain_s=600)
    answered = [request for request in result.requests if request.ok]
    found = {
        "ttft_s": [request.ttft_s for request in answered],
        "ttft_sent_s": [request.ttft_sent_s for request in answered],
        "itl_s": [gap / 1e6 for request in answered for gap in request.gaps_us],
        "send_lag_s": [request.send_lag_s for request in result.requests],
        "succeeded": len(answered),
        "failed": len(result.requests) - len(answered),
    }
    result_file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
