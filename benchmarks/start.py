"""Time of ``bottega serve`` until ``/readyz`` reports ready: first start and later cold ones.

python -m benchmarks.start
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request


def start_s(folder: str) -> float:
    """Return seconds from the start of the process until it is ready; then stop it."""
    environment = {**os.environ, "BOTTEGA_DATA_DIR": folder, "COLUMNS": "200"}
    for name in ("DATABASE_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        environment.pop(name, None)
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "bottega.cli.commands", "serve", "--port", "0"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        while "listens on" not in (line := process.stderr.readline()):
            if not line:
                raise SystemExit("`bottega serve` did not start")
        url = line.split()[3] + "/readyz"
        while True:
            try:
                with urllib.request.urlopen(url):
                    break
            except urllib.error.HTTPError:
                continue
        took = time.perf_counter() - began
        process.terminate()
        process.communicate()
    return took


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="bottega-", ignore_cleanup_errors=True) as folder:
        print(f"first start (creates and migrates the database)  {start_s(folder):5.2f} s")
        again = [start_s(folder) for _ in range(5)]
    print(
        f"cold start on existing data, median of 5           {statistics.median(again):5.2f} s"
        f"   (worst {max(again):.2f} s)"
    )


if __name__ == "__main__":
    main()
