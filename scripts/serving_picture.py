"""Makes the picture of the server's page in docs/serving.md: of a server with the demo model, a few clients, and a browser.

python scripts/serving_picture.py docs/pictures/serving.png          # needs the extras [serve,test-web] and a browser
python scripts/serving_picture.py /tmp/dark.png --dark --width 390
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it also runs where the package is not installed

from tests.server.browsers import browsing, visiting

PLAN = "--percent 0 40 0 70 0 100 --gpu-batch-size 4 --num-gpu-batches 2 --prompt-len 256 --gen-len 256"
BESIDE = {"prompt": ["The ferry", "A boat", "It rains"], "max_tokens": 250, "ignore_eos": True}
CLIENTS = 2
PROMPT, TOKENS, TEMPERATURE = "It was a dark and stormy night, and the captain", 90, 0.7
SECONDS_BEFORE = 45  # of the history that is seen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Makes the picture of the server's page.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1180)
    asked = parser.parse_args(arguments)
    with serving() as url, others(url), browsing() as browser, visiting(browser, url, asked.width, asked.dark) as visit:
        visit.page.wait_for_timeout(1000 * SECONDS_BEFORE)
        visit.ask(PROMPT, TOKENS, TEMPERATURE)
        visit.shows("#outcome", "it ended")
        visit.page.screenshot(path=asked.picture, full_page=True)
    print(f"{asked.picture}: {asked.picture.stat().st_size} bytes")
    return 0


@contextmanager
def serving() -> Iterator[str]:
    """A context in which a server answers at this address."""
    command = [sys.executable, "-m", "h2o_flexgen.serve", "--port", "0", "--verbose", "0", *PLAN.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = (re.search(r"^serving .* at (http://[\w.:]+)", line) for line in process.stdout)
            found = next(filter(None, said), None)
            if found is None:
                raise ValueError("the server has ended before it listened; what it said stands above")
            yield found[1]
        finally:
            for _ in range(2):  # the second ends it at once
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1)


@contextmanager
def others(url: str) -> Iterator[None]:
    """A context in which clients ask for long texts, one after the other."""
    is_over = threading.Event()
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(BESIDE).encode(), {"Content-Type": "application/json"})

    def ask() -> None:
        with suppress(OSError):  # the server is ended
            while not is_over.is_set():
                urllib.request.urlopen(request).read()

    clients = [threading.Thread(target=ask) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        is_over.set()
        for client in clients:
            client.join()


if __name__ == "__main__":
    sys.exit(main())
